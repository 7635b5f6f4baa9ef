"""A trained step that is replayed goes without what it lost."""

from __future__ import annotations

import pytest

from flowfleet.proto.common_pb2 import Sample, SampleId
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from services.controller.job.recovery.losses import _without


@pytest.mark.parametrize(
    ("is_paired", "lost", "left"),
    [
        (False, [], [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]),
        (False, [(0, 1), (1, 0)], [(0, 0), (0, 2), (0, 3), (1, 1)]),
        (True, [(0, 1)], [(0, 2), (0, 3), (1, 0), (1, 1)]),  # its partner was (0, 0)
        (True, [(0, 2), (1, 1)], [(0, 0), (0, 1)]),
    ],
)
def test_of_a_pair_both_go(is_paired: bool, lost: list[tuple[int, int]], left: list[tuple[int, int]]) -> None:
    rows = {(0, 0): 0, (0, 1): 0, (0, 2): 1, (0, 3): 1, (1, 0): 0, (1, 1): 0}
    samples = [
        TrainSample(sample=Sample(id=SampleId(job_id="j", step=3, group=group, index=index)), pair=pair, advantage=0.5)
        for (group, index), pair in rows.items()
    ]
    request = TrainStepRequest(job_id="j", step=3, samples=samples)
    gone = [Sample(id=SampleId(job_id="j", step=3, group=group, index=index)) for group, index in lost]
    found = _without(request, gone, is_paired=is_paired)
    assert (found.job_id, found.step) == ("j", 3)
    assert [(item.sample.id.group, item.sample.id.index) for item in found.samples] == left
    assert all(item.advantage == 0.5 for item in found.samples)
