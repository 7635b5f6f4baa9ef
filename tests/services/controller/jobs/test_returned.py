"""Jobs that return to the queue: when they are tried again, and who runs meanwhile."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from flowfleet.api.jobs import JobStatus
from services.controller.jobs.returned import FIRST_S, KEPT_S, LONGEST_S, Returned
from services.controller.store.records import NO_PLACE, found_no_place
from services.controller.waiting import NoPlace, NotYet
from tests.services.controller.jobs.test_scheduler import SPEC, reached, with_runner
from tests.services.controller.scripted import ScriptedLauncher, ScriptedReward, ScriptedTrainer, scripted_fleet
from tests.waiting import until


def test_each_wait_is_twice_as_long_until_the_trainer_has_a_place() -> None:
    returned = Returned(random.Random(1))
    for tries in range(12):
        longest = min(FIRST_S * 2**tries, LONGEST_S)
        assert longest / 2 <= (delay_s := returned.add("a", 100.0)) <= longest
        assert returned.waits("a", 100.0 + 0.99 * delay_s)
        assert not returned.waits("a", 100.0 + delay_s)
        assert not returned.waits("b", 100.0)
    assert not returned.has_place("a", 100.0)
    returned.placed("a", 100.0)
    assert [returned.has_place("a", 100.0 + later_s) for later_s in (0.0, KEPT_S - 1, KEPT_S)] == [True, True, False]
    assert returned.add("a", 100.0) <= FIRST_S
    assert not returned.has_place("a", 100.0)


def test_all_may_try_when_another_job_ends_and_the_next_wait_is_no_shorter_for_it() -> None:
    returned = Returned(random.Random(1))
    returned.add("a", 0.0)
    returned.end("b")
    assert not returned.waits("a", 0.0)
    assert returned.add("a", 0.0) >= FIRST_S


async def test_a_returned_job_waits_others_of_its_pool_run_and_then_it_runs(redis_url: str, tmp_path: Path) -> None:
    async with with_runner(redis_url, tmp_path) as (runner, store):
        runner.crashes, runner.error = 1, NoPlace("within 300 s: 0/1 nodes are available")
        first, second = [(await store.jobs.create(SPEC))[0].id for _ in range(2)]
        await runner.start()
        await reached(store, second, JobStatus.RUNNING)
        shown = await store.jobs.get(first)
        assert found_no_place(shown.status, shown.reason)
        assert shown.reason.startswith(f"{NO_PLACE} within 300 s: 0/1 nodes are available; tried again within ")
        runner.gate.set()
        await reached(store, first, JobStatus.SUCCEEDED)
        assert runner.order == [first, second, first]


async def test_a_returned_job_is_cancelled_at_once(redis_url: str, tmp_path: Path) -> None:
    async with with_runner(redis_url, tmp_path) as (runner, store):
        runner.crashes, runner.error = 1, NoPlace("within 300 s")
        job, _ = await store.jobs.create(SPEC)
        await runner.start()
        while not (await store.jobs.get(job.id)).reason.startswith(NO_PLACE):
            await asyncio.sleep(0.02)
        await store.jobs.request(job.id, "cancel")
        await runner.notify()
        await reached(store, job.id, JobStatus.CANCELLED)


def job_of(folder: Path) -> dict[str, Any]:
    prompts = folder / "prompts.txt"
    prompts.write_text("a\nb\n")
    return {
        "model": {"path": str(folder / "m")},
        "data": {"train": str(prompts)},
        "rewards": {"ocr": {}},
        "rollout": {"prompts_per_step": 2, "group_size": 4, "batch_size": 8},
        "schedule": {"steps": 3, "save_every": 1},
    }


@pytest.mark.parametrize("has_trained", [False, True])
async def test_a_job_without_a_place_continues_where_it_was(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_trained: bool
) -> None:
    """Runs the real driver: the trainer is refused a place once, at its start or after a step."""
    refused: list[str] = []
    train = ScriptedTrainer.TrainStep

    async def ensure(self: Any, job_id: str, spec: Any) -> str:
        if not refused and has_trained == bool(fleet.trainer.steps):
            refused.append(job_id)
            raise NoPlace("within 300 s")
        return str(self.address)

    async def alive(self: Any, job_id: str) -> bool:
        return bool(refused) or not fleet.trainer.steps

    async def train_step(self: Any, request: Any, context: Any) -> Any:
        if request.step > 0:
            await until(lambda: refused)
        return await train(self, request, context)

    monkeypatch.setattr(ScriptedLauncher, "ensure", ensure)
    monkeypatch.setattr(ScriptedLauncher, "alive", alive)
    monkeypatch.setattr(ScriptedTrainer, "TrainStep", train_step)
    job = job_of(tmp_path)
    reward = ScriptedReward(lambda sample: float(sample.sample_id[-1]))
    async with scripted_fleet(redis_url, tmp_path / "state", {"ocr": reward}) as fleet:
        first = await fleet.submit(job)
        await fleet.reached(first.id, lambda record: found_no_place(record.status, record.reason))
        num_done = len(fleet.trainer.steps)
        fleet.runner._returned.end("another")
        await fleet.succeeded(first.id)
        assert refused == [first.id]
        assert (num_done > 0) == has_trained
        assert [request.step for request in fleet.trainer.steps] == [0, 1, 2]
        assert fleet.trainer.num_ends == 1, "it is asked to end once its job has ended, and not as its job returns"


async def test_pods_of_a_paused_job_that_are_not_all_placed_go(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []

    async def ensure(self: Any, job_id: str, spec: Any) -> str:
        raise NotYet("trainer: 0/1 nodes are available")

    async def stop(self: Any, job_id: str, *, at_once: bool = False) -> None:
        stopped.append(at_once)

    monkeypatch.setattr(ScriptedLauncher, "ensure", ensure)
    monkeypatch.setattr(ScriptedLauncher, "stop", stop)
    monkeypatch.setattr(ScriptedLauncher, "placed", lambda self, job_id: False)
    async with scripted_fleet(redis_url, tmp_path / "state", {"ocr": ScriptedReward(lambda _: 0.5)}) as fleet:
        job = await fleet.submit(job_of(tmp_path))
        await fleet.reached(job.id, lambda record: "nodes are available" in record.reason)
        assert not stopped
        await fleet.store.jobs.request(job.id, "pause")
        await until(lambda: stopped, 20)
        assert stopped[0] is True
