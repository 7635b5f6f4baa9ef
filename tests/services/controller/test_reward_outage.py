"""A reward that fails in mid-job, through the whole control plane: the job pauses and resumes, or continues without it,
and every sample is accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flowfleet.api.jobs import JobStatus
from services.controller.job import mending
from services.controller.rewards import outages
from tests.services.controller.scripted import ScriptedFleet, ScriptedReward, scripted_fleet
from tests.waiting import until

GROUP = 4

Run = Callable[..., AbstractAsyncContextManager[tuple[ScriptedFleet, dict[str, Any]]]]


@pytest.fixture
def run(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Starts a fleet; gives it with a job of two steps and two rewards, `ocr` and `quality`."""
    monkeypatch.setattr(outages, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(mending, "EVERY_S", 0.1)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\nc\n")

    @asynccontextmanager
    async def start(**settings: dict[str, Any]) -> AsyncIterator[tuple[ScriptedFleet, dict[str, Any]]]:
        job = {
            "model": {"path": str(tmp_path / "m")},
            "data": {"train": str(prompts), "validation": str(prompts)},
            "rollout": {"prompts_per_step": 2, "group_size": GROUP, "batch_size": 8},
            "schedule": {"steps": 2, "save_every": 1, "validate_every": 2, "keep_last": 1},
            "timeouts": {"rewards_s": 0.3},
            "rewards": {name: settings.get(name, {}) for name in ("ocr", "quality")},
        }
        rewards = {name: ScriptedReward(by_index, name=name, version="7") for name in ("ocr", "quality")}
        async with scripted_fleet(redis_url, tmp_path / "state", rewards) as fleet:
            yield fleet, job

    return start


def by_index(sample: Any) -> float:
    return int(sample.sample_id.rpartition("/")[2]) / GROUP


async def training_samples(fleet: ScriptedFleet, job_id: str) -> list[Any]:
    return (await fleet.store.samples.page(job_id, purpose="train", limit=50))[0]


async def test_the_job_pauses_and_goes_on_when_the_reward_scores_again(run: Run) -> None:
    async with run() as (fleet, job):
        del job["data"]["validation"]
        fleet.rewards["ocr"].fails_after = 1  # in the middle of the first step
        record = await fleet.submit(job)
        record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        assert "rewards.ocr: service 'ocr' at " in record.reason
        assert "out of memory" in record.reason
        assert 'rewards.ocr.on_failure = "pause"' in record.reason
        assert "the job then resumes by itself" in record.reason
        failed = fleet.rewards["ocr"].failed
        await until(lambda: fleet.rewards["ocr"].failed >= failed + 2)  # it answers Describe, but does not score
        assert await fleet.store.jobs.status(record.id) is JobStatus.PAUSED
        fleet.rewards["ocr"].fails_after = None
        record = await fleet.succeeded(record.id)
        assert (record.results["samples_trained"], record.results["samples_dropped"]) == (16, {})
        assert [request.step for request in fleet.trainer.steps] == [0, 1]
        for sample in await training_samples(fleet, record.id):
            assert sample.versions == {"ocr": "ocr 7", "quality": "quality 7"}


async def test_its_user_pauses_and_resumes_it_meanwhile(run: Run) -> None:
    async with run() as (fleet, job):
        del job["data"]["validation"]
        fleet.rewards["ocr"].fails_after = 1
        record = await fleet.submit(job)
        await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        await fleet.store.jobs.request(record.id, "pause")
        await asyncio.sleep(1.0)  # it hears of that
        fleet.rewards["ocr"].fails_after, failed = None, fleet.rewards["ocr"].failed
        await asyncio.sleep(1.0)
        assert await fleet.store.jobs.status(record.id) is JobStatus.PAUSED, "its user's pause ends by its user alone"
        assert fleet.rewards["ocr"].failed == failed
        await fleet.store.jobs.request(record.id, "resume")
        assert (await fleet.succeeded(record.id)).results["samples_trained"] == 16


async def test_the_next_job_runs_meanwhile(run: Run) -> None:
    async with run() as (fleet, job):
        del job["data"]["validation"]
        fleet.rewards["ocr"].fails_after = 1
        first = await fleet.submit(job | {"pause": {"release_s": 0}})
        await fleet.reached(first.id, lambda record: record.status is JobStatus.PAUSED)
        assert (await fleet.run(job | {"rewards": {"quality": {}}})).status is JobStatus.SUCCEEDED
        fleet.rewards["ocr"].fails_after = None
        assert (await fleet.succeeded(first.id)).results["samples_trained"] == 16


async def test_the_job_goes_on_without_it(run: Run) -> None:
    async with run(quality={"on_failure": "skip"}) as (fleet, job):
        fleet.rewards["quality"].fails_after = 0
        record = await fleet.run(job)
        assert (record.results["samples_trained"], record.results["samples_dropped"]) == (16, {})
        for sample in await training_samples(fleet, record.id):
            assert sample.scores == {"ocr": sample.index / GROUP}
            assert (sample.reward, sample.versions) == (sample.index / GROUP, {"ocr": "ocr 7"})
        rows = {row.step: row.values for row in await fleet.store.history.metrics(record.id)}
        assert rows[1]["critic/rewards/quality/missing"] == 8
        assert rows[1]["critic/rewards/quality/mean"] is None
        assert rows[1]["critic/rewards/ocr/mean"] == (0 + 1 + 2 + 3) / 4 / GROUP
        assert rows[2]["val/num_scored"] == 0, "a total without a reward is not compared with those that have it"
        assert rows[2]["val-core/rewards/ocr/mean"] == 0.0


async def test_what_a_validation_has_scored_is_not_scored_again(run: Run) -> None:
    def no_third_prompt(sample: Any) -> float:
        if sample.sample_id.endswith("/2/0"):  # training has two groups, so it is held out
            raise RuntimeError("out of memory")
        return by_index(sample)

    async with run() as (fleet, job):
        job["rollout"]["batch_size"] = 2  # three held-out prompts in calls of two and one
        del job["rewards"]["quality"]
        ocr = fleet.rewards["ocr"]
        ocr.score = no_third_prompt
        record = await fleet.submit(job)
        await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        ocr.score = by_index
        await fleet.store.jobs.request(record.id, "resume")
        await fleet.runner.notify()
        record = await fleet.succeeded(record.id)
        assert ocr.sizes.count(2) == 2  # once each validation


async def test_its_samples_are_dropped_and_a_step_without_any_pauses_the_job(
    run: Run,
) -> None:
    async with run(quality={"on_failure": "drop"}) as (fleet, job):
        del job["data"]["validation"]
        job["schedule"]["steps"] = 3
        fleet.rewards["quality"].fails_after = 1
        record = await fleet.submit(job)
        record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        assert record.reason.startswith("step 1: no sample has a score")
        assert "resume the job: else it continues with the next step" in record.reason
        fleet.rewards["quality"].fails_after = None
        await fleet.store.jobs.request(record.id, "resume")
        await fleet.runner.notify()
        record = await fleet.succeeded(record.id)
        assert record.results["samples_dropped"] == {"no_score_quality": 3 * GROUP}, "none is asked for in their place"
        assert record.results["samples_trained"] == 3 * GROUP
        assert [(one.step, len(one.samples)) for one in fleet.trainer.steps] == [(0, GROUP), (1, 0), (2, 2 * GROUP)]
        rows = {row.step: row.values for row in await fleet.store.history.metrics(record.id)}
        assert rows[1]["critic/rewards/mean"] is None
        assert rows[1]["training/samples_dropped"] == 3 * GROUP


async def test_so_does_a_step_that_a_gate_masks(run: Run) -> None:
    async with run(quality={"weight": 0.0, "gate": {"below": 2.0, "action": "mask"}}) as (fleet, job):
        record = await fleet.submit(job)
        for step in (0, 1):
            reason = f"step {step}: no sample has a score"
            record = await fleet.reached(record.id, lambda record, why=reason: record.reason.startswith(why))  # type: ignore[misc]
            assert record.status is JobStatus.PAUSED
            await fleet.store.jobs.request(record.id, "resume")
            await fleet.runner.notify()
        record = await fleet.succeeded(record.id)
        assert record.results["samples_dropped"] == {"gated_quality": 4 * GROUP}
        assert [len(request.samples) for request in fleet.trainer.steps] == [0, 0]


async def test_a_masked_sample_is_counted_and_not_replaced(run: Run) -> None:
    async with run(quality={"weight": 0.0, "gate": {"below": 0.1, "action": "mask"}}) as (fleet, job):
        record = await fleet.run(job)
        assert record.results["samples_dropped"] == {"gated_quality": 4}
        for request in fleet.trainer.steps:
            assert [sample.sample.id.index for sample in request.samples] == [1, 2, 3] * 2
        masked = [sample for sample in await training_samples(fleet, record.id) if sample.gated_by]
        assert {(sample.index, sample.drop_reason, sample.scores["ocr"]) for sample in masked} == {
            (0, "gated_quality", 0.0)
        }


async def test_the_time_of_a_users_pause_is_not_the_rewards_fault(run: Run) -> None:
    async with run(quality={"on_failure": "drop"}) as (fleet, job):
        del job["data"]["validation"]
        job["timeouts"]["rewards_s"] = 2.0
        quality = fleet.rewards["quality"]
        quality.fails_after = 0
        record = await fleet.submit(job)
        await until(lambda: quality.failed)
        await fleet.store.jobs.request(record.id, "pause")
        await fleet.runner.notify()
        record = await fleet.reached(record.id, lambda record: record.status is JobStatus.PAUSED)
        await asyncio.sleep(2.1)
        failed = quality.failed
        await fleet.store.jobs.request(record.id, "resume")
        await fleet.runner.notify()
        await until(lambda: quality.failed != failed)
        quality.fails_after = None
        record = await fleet.ended(record.id)
        assert (record.results["samples_trained"], record.results["samples_dropped"]) == (16, {})
