"""Jobs that run side by side in one pool, with real Redis and driver and simulated services: turns at one replica that
refuses requests of a job whose weights it does not serve, and places of trainers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from flowfleet.api.jobs import JobStatus
from flowfleet.proto import trainer_pb2_grpc
from tests.services.controller import scripted
from tests.services.controller.scripted import ScriptedFleet, ScriptedReward, ScriptedRollout, ScriptedTrainer
from tests.waiting import until

TRAIN_S = 0.3
"""Training overlaps with the turns of others."""


class TrainerOfEachJob(trainer_pb2_grpc.TrainerServiceServicer):
    """Gives each call to the trainer of its job."""

    def __init__(self, rollout: ScriptedRollout) -> None:
        self.rollout = rollout
        self.of: dict[str, ScriptedTrainer] = {}
        self.published: list[str] = []
        """Jobs, in the order in which they published."""

    def __getattribute__(self, name: str) -> Any:
        if not name[0].isupper():
            return super().__getattribute__(name)

        async def call(request: Any, context: Any) -> Any:
            job_id = getattr(request, "job_id", "")
            if name == "PublishWeights":
                self.published.append(job_id)
            if name == "TrainStep":
                await asyncio.sleep(TRAIN_S)
            return await getattr(self.of.setdefault(job_id, ScriptedTrainer(self.rollout)), name)(request, context)

        return call


@asynccontextmanager
async def fleet_of(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: int
) -> AsyncIterator[tuple[ScriptedFleet, TrainerOfEachJob]]:
    monkeypatch.setattr(scripted, "ScriptedTrainer", TrainerOfEachJob)
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    reward = ScriptedReward(lambda sample: float(sample.sample_id[-1]))
    async with scripted.scripted_fleet(redis_url, tmp_path / "state", {"ocr": reward}, places=places) as fleet:
        yield fleet, fleet.trainer  # type: ignore[misc]


def job_of(tmp_path: Path, steps: int = 4, **parts: Any) -> dict[str, Any]:
    prompts = str(tmp_path / "prompts.txt")
    return {
        "model": {"path": str(tmp_path / "m")},
        "data": {"train": prompts, "validation": prompts},
        "rewards": {"ocr": {}},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "batch_size": 8},
        "schedule": {"steps": steps, "save_every": 100},
        **parts,
    }


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_jobs_of_a_pool_take_turns_by_whole_steps(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    async with fleet_of(redis_url, tmp_path, monkeypatch, places=2) as (fleet, trainers):
        schedule = {"steps": 6, "max_staleness": max_staleness}
        jobs = [await fleet.submit(job_of(tmp_path, schedule=schedule)) for _ in range(2)]
        for job in jobs:
            assert (await fleet.succeeded(job.id)).results["samples_trained"] == 6 * 8
        for job in jobs:
            assert [request.step for request in trainers.of[job.id].steps] == list(range(6))
            assert max_staleness or not trainers.of[job.id].refused  # else it may train meanwhile
        turns = [job_id for job_id, _ in groupby(trainers.published)]
        assert len(turns) >= 4, "one ran after the other"


async def test_a_paused_job_is_saved_and_makes_room_for_the_next(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_of(redis_url, tmp_path, monkeypatch, places=1) as (fleet, trainers):
        first = await fleet.submit(job_of(tmp_path, 20, pause={"release_s": 0.2}))
        await fleet.reached(first.id, lambda record: record.progress.step >= 1)
        second = await fleet.submit(job_of(tmp_path, 2))
        await fleet.store.jobs.request(first.id, "pause")
        await fleet.succeeded(second.id)
        held = await fleet.store.jobs.get(first.id)
        done = len(trainers.of[first.id].steps)
        assert (held.status, len(trainers.of[first.id].saves)) == (JobStatus.PAUSED, 1)
        assert 1 <= done < 20

        third = await fleet.submit(job_of(tmp_path, 1000))
        await fleet.reached(third.id, lambda record: record.status is JobStatus.RUNNING)
        await fleet.store.jobs.request(first.id, "resume")
        await until(lambda: _says(fleet, first.id, "it waits for one of 1 places"), 60)
        await fleet.store.jobs.request(third.id, "cancel")
        await fleet.succeeded(first.id)
        assert [request.step for request in trainers.of[first.id].steps] == list(range(20))


async def _says(fleet: ScriptedFleet, job_id: str, words: str) -> bool:
    return words in (await fleet.store.jobs.get(job_id)).reason


async def test_jobs_in_mid_step_go_on_after_another_controller_took_over(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_of(redis_url, tmp_path, monkeypatch, places=2) as (fleet, trainers):
        jobs = [await fleet.submit(job_of(tmp_path, 6)) for _ in range(3)]
        for _ in range(3):
            await asyncio.sleep(0.3)
            await fleet.restart()
        for job in jobs:
            await fleet.succeeded(job.id)
            assert [request.step for request in trainers.of[job.id].steps] == list(range(6))


async def test_a_job_of_higher_priority_is_next(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet_of(redis_url, tmp_path, monkeypatch, places=1) as (fleet, trainers):
        running, normal, asked = [await fleet.submit(job_of(tmp_path, 3)) for _ in range(3)]
        await fleet.store.jobs.prioritize(asked.id, "high")
        for job in (running, normal, asked):
            await fleet.succeeded(job.id)
        assert [job_id for job_id, _ in groupby(trainers.published)] == [running.id, asked.id, normal.id]
