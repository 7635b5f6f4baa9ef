"""The model of a job is kept: the best checkpoints stay, and the card says how the training went."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from flowfleet.api.jobs import JobStatus
from flowfleet.errors import Conflict
from flowfleet.job.spec import parse_job
from flowfleet.proto import reward_pb2
from services.controller.job.reporting.reports import best_steps
from services.controller.store.records import Validation
from tests.models_on_disk import write_model
from tests.services.controller.scripted import ScriptedFleet, ScriptedReward, scripted_fleet

Run = Callable[..., AbstractAsyncContextManager[ScriptedFleet]]


@pytest.fixture
def run(redis_url: str, tmp_path: Path) -> Run:
    """Starts a fleet with one reward, `ocr`."""
    return lambda reward, **settings: scripted_fleet(redis_url, tmp_path / "state", {"ocr": reward}, **settings)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Three steps of two prompts × two samples, each saved and validated; whole parts can be replaced."""
    (tmp_path / "prompts.txt").write_text("a\nb\nc\n")
    (tmp_path / "held-out.txt").write_text("first | prompt\nsecond\n")
    base: dict[str, Any] = {
        "model": {"path": str(tmp_path / "m")},
        "data": {"train": str(tmp_path / "prompts.txt"), "validation": str(tmp_path / "held-out.txt")},
        "rewards": {"ocr": {}},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "batch_size": 4},
        "schedule": {"steps": 3, "save_every": 1, "validate_every": 1, "keep_last": 1},
    }
    return lambda **parts: {name: {**base.get(name, {}), **part} for name, part in {**base, **parts}.items()}


def by_version(*held_out: float) -> ScriptedReward:
    """Scores held-out samples by the version that sampled them."""

    def score(sample: reward_pb2.RewardSample) -> float:
        _, step, _, index = sample.sample_id.split("/")
        return held_out[int(step)] if sample.prompt in ("first | prompt", "second") else float(index)

    return ScriptedReward(score)


def validation(version: int, reward: float | None, revision: int = 0) -> Validation:
    return Validation(version=version, reward=reward, revision=revision)


def test_the_best_are_compared_within_one_revision_of_the_rewards() -> None:
    known = [validation(1, 0.9), validation(2, 0.5), validation(3, None), validation(4, 0.5), validation(5, 0.8)]
    assert best_steps({1, 2, 3, 4}, known, 2) == [1, 4]
    assert best_steps({1, 2, 3, 4}, known, 0) == []
    changed = [*known, validation(6, 0.1, 1), validation(7, 0.2, 1)]
    assert best_steps({1, 2, 3, 4, 6, 7}, changed, 5) == [7, 6]
    assert best_steps({1, 2, 4}, changed, 1) == [1]
    few = [*known, Validation(version=5, reward=9.0, values={"val/num_scored": 1.0})]
    many = [one.model_copy(update={"values": {"val/num_scored": 8.0}}) for one in known]
    assert best_steps({1, 5}, few, 1) == [5]
    assert best_steps({1, 5}, [*many, few[-1]], 1) == [1], "one sample of eight says little"
    swapped = few[-1].model_copy(update={"revision": 1})
    assert best_steps({1, 5}, [*many, swapped], 1) == [5], "by other rewards, which score fewer"


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"data": {"validation": None}}, "give data.validation"),
        ({"schedule": {"keep_best": 1, "validate_every": 2, "steps": 2}}, "set schedule.validate_every to"),
        ({"rewards": {"ocr": {"curve": [[0, 1.0], [2, 0.5]]}}}, "rewards.ocr.curve changes what they count"),
    ],
)
def test_the_best_need_what_can_be_compared(
    parts: dict[str, Any], words: str, job: Callable[..., dict[str, Any]]
) -> None:
    settings = job(**{"schedule": {"keep_best": 1}} | parts)
    with pytest.raises(ValueError, match=words):
        parse_job(settings)


async def test_the_best_stay_and_the_card_tells_the_training(run: Run, job: Callable[..., Any]) -> None:
    settings = job(schedule={"keep_best": 1}, rewards={"ocr": {"gate": {"below": 0.1}}})
    reward = by_version(0.25, 0.75, 0.5, 0.5)
    reward.described = {"name": "ScriptedReward", "version": "1"}
    async with run(reward) as fleet:
        record = await fleet.run(settings)
        assert [list(request.keep) for request in fleet.trainer.saves] == [[], [1], [1]]
        assert [one.step for one in await fleet.store.history.checkpoints(record.id)] == [1, 3]
        (export,) = fleet.trainer.exports
        for line in (
            "| 0 | 0.25 | 0 |",
            "| 3 | 0.5 | 0 |",
            "Before training: 0.25. After 3 steps: 0.5.",
            "| first \\| prompt | 0.25 | 0.5 |",
            "- `ocr` (service `ocr`), weight 1, scored by ScriptedReward 1",
            "- `ocr`: zero samples that score below 0.1",
        ):
            assert line in export.card.split("\n"), export.card
        recipe = json.loads(export.card.partition("```json\n")[2].partition("```")[0])
        assert parse_job(recipe) == parse_job(settings)


# Ended sooner, or later -----------------------------------------------------------------------------------------------


async def trained(fleet: ScriptedFleet, job: dict[str, Any], steps: int) -> str:
    """A job that has done some steps."""
    record = await fleet.submit(job)
    await fleet.reached(record.id, lambda now: now.progress.step >= steps)
    return record.id


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_job_is_finished_with_all_that_its_end_brings(
    run: Run, job: Callable[..., Any], is_paused: bool
) -> None:
    settings = job(schedule={"steps": 10_000, "save_every": 1000, "validate_every": 1000})
    async with run(ScriptedReward(lambda sample: float(sample.sample_id[-1]))) as fleet:
        job_id = await trained(fleet, settings, 2)
        if is_paused:
            await fleet.store.jobs.request(job_id, "pause")
            await fleet.reached(job_id, lambda now: now.status is JobStatus.PAUSED)
        for _ in range(2):  # the answer to the first was lost
            await fleet.store.jobs.request_steps(job_id, 0)
        record = await fleet.succeeded(job_id)
        steps = record.progress.step
        assert 2 <= steps == record.progress.steps == len(fleet.trainer.steps) < 100
        assert fleet.trainer.published[-1][0] == steps
        assert [one.step for one in await fleet.store.history.checkpoints(job_id)] == [steps]
        assert [one.version for one in await fleet.store.history.validations(job_id)] == [0, steps]
        assert len(fleet.trainer.exports) == 1
        assert (await fleet.store.jobs.request_steps(job_id, 0)).status is JobStatus.SUCCEEDED
        with pytest.raises(Conflict, match="flowfleet submit --from ID"):
            await fleet.store.jobs.request_steps(job_id, steps + 1)


async def test_a_job_is_extended_and_what_cannot_be_is_refused(run: Run, job: Callable[..., Any]) -> None:
    settings = job(schedule={"steps": 2, "save_every": 2, "validate_every": 2})
    async with run(ScriptedReward(lambda sample: float(sample.sample_id[-1]))) as fleet:
        record = await fleet.submit(settings)
        with pytest.raises(Conflict, match="has not trained a step yet"):
            await fleet.store.jobs.request_steps(record.id, 0)
        await fleet.store.jobs.request_steps(record.id, 5)
        record = await fleet.ended(record.id)
        assert (record.status, record.progress.step, record.progress.steps) == (JobStatus.SUCCEEDED, 5, 5)
        assert [request.step for request in fleet.trainer.steps] == list(range(5))


async def test_the_newest_checkpoint_has_the_model_of_a_cancelled_job(
    run: Run, job: Callable[..., Any], tmp_path: Path
) -> None:
    settings = job(schedule={"steps": 10_000})
    async with run(ScriptedReward(lambda sample: float(sample.sample_id[-1]))) as fleet:
        job_id = await trained(fleet, settings, 1)
        folder = tmp_path / "state" / "jobs" / job_id / "checkpoints" / "step-00000001" / "model"
        write_model(folder, job_id, 1, b"weights")
        await fleet.store.jobs.request(job_id, "cancel")
        record = await fleet.ended(job_id)
        assert (record.status, record.results["model"]) == (JobStatus.CANCELLED, str(folder))
