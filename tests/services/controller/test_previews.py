"""Select-then-train through the whole control plane on a fleet without models: which previews are asked for, what is
made of them, and that a restart makes the same choice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.api.jobs import JobStatus
from flowfleet.job.spec import parse_job
from flowfleet.proto import common_pb2, reward_pb2
from flowfleet.seeds import sample_seed
from services.controller.job.commands.previews import is_due, not_selected
from services.controller.job.machine.batch import SampleState
from services.controller.rewards.job_rewards import SampleScore
from tests.services.controller.scripted import ScriptedFleet, ScriptedReward
from tests.services.controller.test_control_plane import Job, Run, by_index, places
from tests.services.controller.test_control_plane import job as job
from tests.services.controller.test_control_plane import run as run

PREVIEW = {
    "prompts_per_step": 2,
    "group_size": 4,
    "batch_size": 8,
    "preview": {"keep": 2, "num_inference_steps": 3},
}
INDICES = {common_pb2.PURPOSE_PREVIEW: [0, 1, 2, 3], common_pb2.PURPOSE_TRAIN: [0, 3]}


def requests_of(fleet: ScriptedFleet, purpose: int) -> list[Any]:
    return [request for request in fleet.rollout.requests if request.purpose == purpose]


@pytest.mark.parametrize(
    ("algorithm", "keep_pictures"), [("diffusion_nft", 200), ("flow_grpo", 0), ("online_dpo", 200)]
)
async def test_extremes_are_made_again_and_trained_on(run: Run, job: Job, algorithm: str, keep_pictures: int) -> None:
    settings = job(algorithm={"name": algorithm}, rewards={"ocr": {}}, rollout=PREVIEW)
    settings["schedule"]["keep_pictures"] = keep_pictures
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        record = await fleet.run(settings)
        for purpose, indices in INDICES.items():
            requests = requests_of(fleet, purpose)
            assert len(requests) == 2
            for step, request in enumerate(requests):
                assert [list(group.indices) for group in request.groups] == [indices, indices]
                seeds = [sample_seed(record.spec["seed"], step, 1, index) for index in indices]
                assert list(request.groups[1].seeds) == seeds  # a preview's is that of its sample
        preview, made = (requests_of(fleet, purpose)[0] for purpose in INDICES)
        assert (preview.sampling.num_inference_steps, made.sampling.num_inference_steps) == (3, 10)
        assert (preview.noise.eta, list(preview.noise.sde_steps)) == (0.0, [])
        for request in fleet.trainer.steps:
            assert {place[:2] for place in places(request)} == {(group, index) for group in (0, 1) for index in (0, 3)}
        assert record.results["samples_dropped"] == {"not_selected": 8}
        assert record.results["samples_trained"] == 8
        stored = [name async for name in fleet.redis.scan_iter(match=f"ff:{record.id}:blob:media:*")]
        assert len(stored) == (8 if keep_pictures else 0)  # previews never stay


async def test_a_restart_after_the_choice_neither_previews_nor_chooses_again(run: Run, job: Job) -> None:
    settings = job(algorithm={"name": "diffusion_nft"}, rewards={"ocr": {}}, rollout=PREVIEW)
    refusing: list[ScriptedFleet] = []

    def score(sample: reward_pb2.RewardSample) -> float:
        for fleet in refusing:
            fleet.rollout.refuses = True  # from the first preview's score on nothing is made
        return by_index(sample)

    async with run(ocr=ScriptedReward(score)) as fleet:
        refusing.append(fleet)
        record = await fleet.submit(settings)
        await fleet.reached(record.id, lambda seen: seen.progress.samples == 4)  # of eight
        refusing.clear()
        await fleet.restart(lambda: setattr(fleet.rollout, "refuses", False))
        ended = await fleet.ended(record.id)
        assert ended.status is JobStatus.SUCCEEDED, ended.reason
        previews = Counter(request.step for request in requests_of(fleet, common_pb2.PURPOSE_PREVIEW))
        assert previews == {0: 1, 1: 1}
        assert ended.results["samples_dropped"] == {"not_selected": 8}
        assert [sorted(place[:2] for place in places(request)) for request in fleet.trainer.steps] == [
            [(0, 0), (0, 3), (1, 0), (1, 3)]
        ] * 2


async def test_a_restart_before_the_choice_makes_the_same_previews_again(run: Run, job: Job) -> None:
    """Previews are kept in memory and asked for once while the reward fails. A restart begins again."""
    settings = job(algorithm={"name": "diffusion_nft"}, rewards={"ocr": {}}, rollout=PREVIEW)
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        reward = fleet.rewards["ocr"]
        reward.fails_after = 0
        record = await fleet.submit(settings)
        await fleet.reached(record.id, lambda seen: reward.failed >= 4)
        first = requests_of(fleet, common_pb2.PURPOSE_PREVIEW)
        assert len(first) == 1
        await fleet.restart(lambda: setattr(reward, "fails_after", None))
        ended = await fleet.ended(record.id)
        assert ended.status is JobStatus.SUCCEEDED, ended.reason
        again = requests_of(fleet, common_pb2.PURPOSE_PREVIEW)
        assert [request.step for request in again] == [0, 0, 1]
        assert again[1].groups == first[0].groups
        assert ended.results["samples_dropped"] == {"not_selected": 8}


async def test_a_preview_that_a_gate_masks_is_dropped_by_its_own_reason(run: Run, job: Job) -> None:
    gate = {"below": 0.1, "action": "mask"}  # index 0
    settings = job(algorithm={"name": "diffusion_nft"}, rewards={"ocr": {"gate": gate}}, rollout=PREVIEW)
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        record = await fleet.run(settings)
        assert record.results["samples_dropped"] == {"gated_ocr": 4, "not_selected": 4}
        for request in requests_of(fleet, common_pb2.PURPOSE_TRAIN):
            assert [list(group.indices) for group in request.groups] == [[1, 3], [1, 3]]


@given(totals=st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=2, max_size=9), keep=st.integers(2, 8))
def test_the_choice_by_the_definition(totals: list[int | None], keep: int) -> None:
    """The lowest half and the highest half of what has a total; of equal totals a higher index counts as better."""
    verdicts = {
        index: SampleScore(None, "no_score_ocr") if total is None else SampleScore(float(total))
        for index, total in enumerate(totals)
    }
    found = not_selected(3, verdicts, keep)
    ranked = sorted((total, index) for index, total in enumerate(totals) if total is not None)
    kept = set(ranked) if len(ranked) <= keep else {*ranked[: keep // 2], *ranked[len(ranked) - (keep - keep // 2) :]}
    assert {index for _, index in kept} == set(range(len(totals))) - found.keys()
    for index, reason in found.items():
        assert reason == ("no_score_ocr" if totals[index] is None else "not_selected")


def test_a_group_is_chosen_from_once() -> None:
    samples = {index: SampleState() for index in range(4)}
    assert is_due(samples, 2)
    samples[1].status = samples[2].status = "dropped"
    assert not is_due(samples, 2)
    samples[0].status = "dropped"
    samples[4] = SampleState()  # asked for in its place
    assert not is_due(samples, 2)


async def test_previews_alone_compute_in_float8(run: Run, job: Job) -> None:
    """Replicas hold copies, and all other requests ask for the weights as they are; noise is that of the samples."""
    preview = {"keep": 2, "quantization": "fp8"}
    settings = job(algorithm={"name": "flow_grpo"}, rewards={"ocr": {}}, rollout={**PREVIEW, "preview": preview})
    assert parse_job(settings).rollout.has_fp8_copies
    assert not parse_job(job(rewards={"ocr": {}})).rollout.has_fp8_copies
    async with run(ocr=ScriptedReward(by_index)) as fleet:
        await fleet.run(settings)
        previews, made = (requests_of(fleet, purpose) for purpose in INDICES)
        assert [request.sampling.full_precision for request in (*previews, *made)] == [False] * 2 + [True] * 2
        for preview, exact in zip(previews, made, strict=True):
            assert (preview.noise, preview.record) == (exact.noise, common_pb2.RECORD_UNSPECIFIED)
            assert preview.sampling.num_inference_steps == exact.sampling.num_inference_steps
