"""The queue of jobs, with a real Redis and a driver that only waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from flowfleet.jobs import RolloutPart, parse_job
from flowfleet.redis_client import connect
from services.controller.records import JobRecord, JobStatus
from services.controller.runner import Runner
from services.controller.settings import ControllerSettings
from services.controller.store import JobStore

SPEC = parse_job({"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}})


class WaitingRunner(Runner):
    """Ends a job when told to."""

    order: list[str]
    gate: asyncio.Event
    crashes = 0

    async def _drive(self, record: JobRecord) -> None:
        self.order.append(record.id)
        await self._store.set_status(record.id, JobStatus.RUNNING)
        if self.crashes:
            self.crashes -= 1
            raise RuntimeError("a bug of ours")
        await self.gate.wait()
        await self._store.set_status(record.id, JobStatus.SUCCEEDED)


def with_runner(url: str, state: Path, use: Callable[[WaitingRunner, JobStore], Awaitable[None]]) -> None:
    async def scenario() -> None:
        redis = connect(url)
        store = JobStore(redis)
        settings = ControllerSettings(redis_url=SecretStr(url), state_dir=state)
        runner = WaitingRunner(settings, redis, store, CollectorRegistry())
        runner.order, runner.gate = [], asyncio.Event()
        try:
            await use(runner, store)
        finally:
            await runner.stop()
            await redis.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 30))


async def reached(store: JobStore, job_id: str, status: JobStatus) -> None:
    while (await store.get(job_id)).status is not status:
        await asyncio.sleep(0.02)


def test_jobs_run_one_after_the_other_and_a_cancelled_one_leaves_the_queue_at_once(
    redis_url: str, tmp_path: Path
) -> None:
    async def use(runner: WaitingRunner, store: JobStore) -> None:
        first, second, third = [(await store.create(SPEC))[0].id for _ in range(3)]
        await runner.start()
        await reached(store, first, JobStatus.RUNNING)
        await store.request(second, "cancel")
        await runner.notify()
        await reached(store, second, JobStatus.CANCELLED)
        assert (await store.get(third)).status is JobStatus.QUEUED
        runner.gate.set()
        await reached(store, third, JobStatus.SUCCEEDED)
        assert runner.order == [first, third]

    with_runner(redis_url, tmp_path, use)


def test_each_pool_runs_a_job_of_its_own(redis_url: str, tmp_path: Path) -> None:
    async def use(runner: WaitingRunner, store: JobStore) -> None:
        first, second = [(await store.create(SPEC))[0].id for _ in range(2)]
        elsewhere, _ = await store.create(SPEC.model_copy(update={"rollout": RolloutPart(pool="wide")}))
        await runner.start()
        await reached(store, first, JobStatus.RUNNING)
        await reached(store, elsewhere.id, JobStatus.RUNNING)
        assert (await store.get(second)).status is JobStatus.QUEUED
        runner.gate.set()
        await reached(store, second, JobStatus.SUCCEEDED)
        assert (set(runner.order[:2]), runner.order[2:]) == ({first, elsewhere.id}, [second])

    with_runner(redis_url, tmp_path, use)


def test_a_crash_of_the_driver_is_survived(redis_url: str, tmp_path: Path) -> None:
    async def use(runner: WaitingRunner, store: JobStore) -> None:
        runner.crashes = 1
        runner.gate.set()
        job, _ = await store.create(SPEC)
        await runner.start()
        await reached(store, job.id, JobStatus.SUCCEEDED)
        assert runner.order == [job.id, job.id]

    with_runner(redis_url, tmp_path, use)
