"""Samples that a reward gives no score: how many are only counted, warned of, or pause the job, and how an open step is
scored again after the repair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowfleet.api.jobs import JobStatus
from flowfleet.proto import reward_pb2
from services.controller.job.machine.batch import Batch
from tests.services.controller.scripted import ScriptedReward
from tests.services.controller.test_control_plane import Run
from tests.services.controller.test_control_plane import job as job
from tests.services.controller.test_control_plane import run as run
from tests.services.controller.test_reward_swaps import change

Job = Callable[..., dict[str, Any]]
STEP = 16


class Picky(ScriptedReward):
    """Gives the first `number` samples of step 0, over both groups, NaN."""

    def __init__(self, number: int) -> None:
        super().__init__(self._score)
        self.number = number

    def _score(self, sample: reward_pb2.RewardSample) -> float:
        _, step, group, index = sample.sample_id.split("/")
        is_refused = step == "0" and 2 * int(index) + int(group) < self.number
        return float("nan") if is_refused else int(index) / 8


def settings_of(job: Job) -> dict[str, Any]:
    rollout = {"prompts_per_step": 2, "group_size": 8, "batch_size": 16, "max_refills": 0}
    return job(algorithm={"name": "diffusion_nft"}, rewards={"ocr": {}}, rollout=rollout)


@pytest.mark.parametrize("number", [0, 1, 2, 8])
async def test_a_tenth_of_a_step_is_warned_of(run: Run, job: Job, number: int) -> None:
    async with run(ocr=Picky(number)) as fleet:
        record = await fleet.run(settings_of(job))
        assert record.status is JobStatus.SUCCEEDED, record.reason
        cause = f"step 0: rewards.ocr gave no score for {number} of 16 samples (the score is nan)"
        assert record.progress.warning == (cause if number > 1 else "")
        [listed], _ = await fleet.store.lists.page()
        [row] = await fleet.store.lists.rows([record.id])
        assert listed.progress.warning == row.progress.warning == record.progress.warning
        causes = {"no_score_ocr": "the score is nan"} if number else {}
        assert record.progress.drop_causes == record.results["drop_causes"] == causes
        samples, _ = await fleet.store.samples.page(record.id, step=0, limit=99)
        told = {(one.drop_reason, one.drop_cause) for one in samples if one.reward is None}
        assert told == ({("no_score_ocr", "the score is nan")} if number else set())


async def test_more_than_half_pauses_and_a_resumed_job_trains_on_the_rest(run: Run, job: Job) -> None:
    async with run(ocr=Picky(9)) as fleet:
        record = await fleet.submit(settings_of(job))
        paused = await fleet.reached(record.id, lambda seen: seen.status is JobStatus.PAUSED)
        assert paused.reason.startswith("step 0: rewards.ocr gave no score for 9 of 16 samples (the score is nan). ")
        assert "`flowfleet rewards set ID ocr --open-steps`" in paused.reason
        await fleet.store.jobs.request(record.id, "resume")
        ended = await fleet.reached(record.id, lambda seen: seen.status.terminal)
        assert (ended.status, ended.results["samples_trained"]) == (JobStatus.SUCCEEDED, 2 * STEP - 9)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_repaired_reward_scores_the_open_step_again(run: Run, job: Job, restarts: bool) -> None:
    async with run(ocr=Picky(9)) as fleet:
        record = await fleet.submit(settings_of(job))
        await fleet.reached(record.id, lambda seen: seen.status is JobStatus.PAUSED)
        fleet.rewards["ocr"].number = 0  # type: ignore[attr-defined]
        if restarts:
            await fleet.restart(lambda: None)
        await change(fleet, record.id, set={"ocr": {}}, open_steps=True)
        await fleet.store.jobs.request(record.id, "resume")
        ended = await fleet.reached(record.id, lambda seen: seen.status.terminal)
        assert ended.status is JobStatus.SUCCEEDED, ended.reason
        assert (ended.results["samples_trained"], ended.results["samples_dropped"]) == (2 * STEP, {})
        history = await fleet.store.rewards.history(record.id)
        assert [(one.from_step, one.open_steps) for one in history] == [(0, True)]


def test_an_open_step_keeps_what_no_reward_dropped_and_one_at_the_trainer_keeps_all() -> None:
    def judged(reason: str) -> Batch:
        batch = Batch.opened(0, 1, 3, 0.0)
        for sample, status in zip(batch.groups[0].values(), ("scored", "dropped", "wanted"), strict=True):
            batch.move(0, sample, status)  # type: ignore[arg-type]
        batch.groups[0][1].reason = reason
        return batch

    for reason in ("no_score_a", "gated_a", "reward_failed", "non_finite_sum", "non_finite_reference_kl"):
        batch = judged(reason)
        assert batch.score_again() == {reason: 1}
        assert [one.status for one in batch.groups[0].values()] == ["sampled", "sampled", "wanted"]
    for reason in ("lost", "rollout_failed", "not_selected"):
        batch = judged(reason)
        assert batch.score_again() == {}
        assert [one.status for one in batch.groups[0].values()] == ["sampled", "dropped", "wanted"]
