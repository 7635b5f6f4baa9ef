"""What a TrainStep is refused for, each time with the sample's name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowfleet.errors import InvalidRequest
from flowfleet.job.spec import JobSpec
from flowfleet.proto.common_pb2 import BlobRef, Sample, SampleId
from flowfleet.proto.trainer_pb2 import TrainSample, TrainStepRequest
from services.trainer.step.requests import check_directory, check_request, pairs_of
from tests.services.trainer.steps import JOB, make_spec

Change = Callable[[TrainStepRequest], object]


def spec_of(name: str, **rollout: Any) -> JobSpec:
    part = {"name": name, "pairs_per_group": 2} if name == "online_dpo" else {"name": name}
    return make_spec(Path("model"), algorithm=part, rollout={"group_size": 4, **rollout})


def request_of(spec: JobSpec) -> TrainStepRequest:
    """Two groups of two pairs each: (0, 1) and (2, 3), the even ones win."""
    blob, size = BlobRef(uri="redis:x"), spec.rollout.size
    samples = [
        TrainSample(
            sample=Sample(
                id=SampleId(job_id=JOB, group=group, index=index),
                trajectory=blob,
                prompt_embeds=blob,
                sde_steps=[0, 1] if spec.records_steps else [],
                height=size.height,
                width=size.width,
                num_frames=size.num_frames,
            ),
            advantage=-1.0 if index % 2 else 1.0,
            pair=index // 2,
        )
        for group in range(2)
        for index in range(4)
    ]
    return TrainStepRequest(job_id=JOB, samples=samples)


def test_pairs_are_winner_and_loser_by_group_and_number() -> None:
    spec = spec_of("online_dpo")
    request = request_of(spec)
    assert len(check_request(request, spec)) == 8
    assert pairs_of(request, spec) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    request.samples.reverse()
    assert sorted(pairs_of(request, spec)) == [(1, 0), (3, 2), (5, 4), (7, 6)]
    for other in ("flow_grpo", "diffusion_nft"):
        assert pairs_of(request_of(spec_of(other)), spec_of(other)) == []


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda request: request.samples.pop(), r"job-1/0/1/2: its pair 1 has 1 winners and 0 losers among 1"),
        (lambda request: setattr(request.samples[1], "advantage", 1.0), r"0/0/0: its pair 0 has 2 winners"),
        (lambda request: setattr(request.samples[2], "advantage", 0.0), r"0/0/2: its pair 1 has 0 winners"),
        (lambda request: setattr(request.samples[3], "pair", 0), r"0/0/0: its pair 0 has 1 winners and 2 losers"),
    ],
    ids=["incomplete", "two-winners", "no-winner", "odd"],
)
def test_what_is_no_pair_is_named(change: Change, match: str) -> None:
    spec = spec_of("online_dpo")
    request = request_of(spec)
    change(request)
    with pytest.raises(InvalidRequest, match=match):
        pairs_of(request, spec)


@pytest.mark.parametrize("name", ["diffusion_nft", "online_dpo"])
def test_matching_losses_ask_for_no_noisy_steps(name: str) -> None:
    spec = spec_of(name)
    request = request_of(spec)
    assert check_request(request, spec) == [(group, index) for group in range(2) for index in range(4)]
    policy = spec_of("flow_grpo")
    with pytest.raises(InvalidRequest, match=r"0/0/0: noise entered at steps \[\]"):
        check_request(request, policy)


def test_frames_and_negatives_are_checked() -> None:
    spec = spec_of("flow_grpo", num_frames=5, guidance_scale=2.0)
    request = request_of(spec)
    with pytest.raises(InvalidRequest, match="no negative embeds"):
        check_request(request, spec)
    for item in request.samples:
        item.sample.negative_embeds.CopyFrom(item.sample.prompt_embeds)
    request.samples[3].sample.num_frames = 1
    with pytest.raises(InvalidRequest, match="0/0/3: it has 32×32 pixels, this job's have 32×32 pixels in 5 frames"):
        check_request(request, spec)


@pytest.mark.parametrize("name", ["online_dpo", "flow_grpo"])
def test_a_step_may_have_nothing_to_learn_from(name: str) -> None:
    assert check_request(TrainStepRequest(job_id=JOB, step=3), spec_of(name)) == []


def test_a_directory_is_one_of_the_jobs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "jobs" / "job-1"
    (tmp_path / "jobs" / "link").mkdir(parents=True)
    own.symlink_to(tmp_path / "jobs" / "link")
    check_directory("/anywhere/checkpoints", "job-1")
    monkeypatch.setenv("FLOWFLEET_STATE_DIR", str(tmp_path))
    for wrong in ("", "checkpoints", "/etc", f"{own}/../job-2", f"{tmp_path}/jobs", f"{own}/checkpoints", "/a\0b"):
        with pytest.raises(InvalidRequest, match="directory"):
            check_directory(wrong, "job-1")  # the job's folder is a link out of it
    own.unlink()
    check_directory(f"{own}/checkpoints", "job-1")
    check_directory(f"{own}/model", "job-1")
    for job_id in ("job-2", "", "..", "."):
        with pytest.raises((InvalidRequest, ValueError), match="job"):
            check_directory(f"{own}/checkpoints", job_id)
