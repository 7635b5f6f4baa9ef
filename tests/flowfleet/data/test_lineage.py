"""Which weights go with which ledger."""

from __future__ import annotations

import pytest

from flowfleet.data.lineage import extend, follow, misfit
from flowfleet.proto import trainer_pb2


def request(step: int, advantage: float = 1.0) -> trainer_pb2.TrainStepRequest:
    return trainer_pb2.TrainStepRequest(job_id="j", step=step, samples=[trainer_pb2.TrainSample(advantage=advantage)])


def history(*advantages: float) -> dict[int, str]:
    """Lineages of a job whose steps had these requests."""
    made: dict[int, str] = {}
    for step, advantage in enumerate(advantages):
        extend(made, request(step, advantage))
    return made


def test_a_lineage_tells_every_request_before_it() -> None:
    made = history(1.0, 2.0, 3.0)
    assert sorted(made) == [1, 2, 3]
    assert made == history(1.0, 2.0, 3.0)
    for other in (history(9.0, 2.0, 3.0), history(1.0, 9.0, 3.0), history(1.0, 2.0, 9.0)):
        assert other[3] != made[3]
    assert history(1.0, 9.0, 3.0)[1] == made[1]


def test_a_lineage_that_is_not_known_makes_no_other() -> None:
    """Covers jobs that began before lineages were kept."""
    assert follow({}, request(4)) == ""
    known: dict[int, str] = {}
    extend(known, request(4))
    assert known == {}
    assert follow({}, request(0)) != ""


@pytest.mark.parametrize(
    ("applied", "said"),
    [(0, ""), (4, ""), (5, ""), (6, "version 6 is ahead of the ledger, which is at version 4")],
)
def test_versions_up_to_the_ledger_go_with_it(applied: int, said: str) -> None:
    ledger = trainer_pb2.LedgerPosition(version=4, latest=5)
    found = misfit(applied, {}, ledger)
    assert (said in found) if said else not found


def test_weights_of_another_history_do_not_go_with_the_ledger() -> None:
    ours, theirs = history(1.0, 2.0, 3.0, 4.0), history(1.0, 2.0, 9.0, 4.0)
    ledger = trainer_pb2.LedgerPosition(version=4, latest=4, history={2: ours[2], 4: ours[4]})
    assert misfit(4, ours, ledger) == ""
    assert "from other steps" in misfit(4, theirs, ledger)
    assert misfit(2, theirs, ledger) == ""
    assert misfit(4, {}, ledger) == ""  # a checkpoint from before lineages were kept
