"""The queue of jobs, with a real Redis and a driver that only waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.errors import Unavailable
from flowfleet.job.spec import RolloutPart, parse_job
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller import concurrency
from services.controller.jobs import runner as job_runner
from services.controller.jobs import scheduler
from services.controller.jobs.scheduler import JobScheduler
from services.controller.jobs.submission.opening import Unopened
from services.controller.platforms import launcher
from services.controller.platforms.launcher import stopped
from services.controller.platforms.local.directory import StaticDirectory
from services.controller.platforms.local.launcher import LocalLauncher
from services.controller.prompts.sources import Unread
from services.controller.settings import ControllerSettings
from services.controller.store.leadership import LeaseLost
from services.controller.store.records import FORMAT, UNREADABLE, JobRecord
from services.controller.store.store import Store
from tests.waiting import until

SPEC = parse_job({"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}})


class WaitingRunner(JobScheduler):
    """Ends a job when told to."""

    order: list[str]
    gate: asyncio.Event
    crashes = 0
    error: Exception = RuntimeError("a bug of ours")
    lasts_s = 0.0
    opens = True

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._runner._drive = self._drive  # type: ignore[method-assign]

    async def _drive(self, record: JobRecord) -> None:
        self.order.append(record.id)
        if self.opens:
            await self._store.jobs.set_status(record.id, JobStatus.RUNNING)
        if self.crashes:
            self.crashes -= 1
            await asyncio.sleep(self.lasts_s)
            raise self.error
        await self.gate.wait()
        await self._store.jobs.set_status(record.id, JobStatus.SUCCEEDED)


class RefusingLauncher(LocalLauncher):
    """Ends no trainer: the cluster has taken its rights away, say."""

    tries = 0

    async def stop(self, job_id: str, *, at_once: bool = False) -> None:
        self.tries += 1
        raise RuntimeError("refused")

    async def keep_only(self, job_ids: Collection[str]) -> None:
        raise RuntimeError("refused")


@asynccontextmanager
async def with_runner(
    url: str, state: Path, launcher: LocalLauncher | None = None
) -> AsyncIterator[tuple[WaitingRunner, Store]]:
    redis = connect(url)
    store = Store(redis)
    settings = ControllerSettings(redis_url=SecretStr(url), state_dir=state)
    here = launcher or LocalLauncher(state, places=1)
    runner = WaitingRunner(settings, redis, store, CollectorRegistry(), here, StaticDirectory(settings.rewards))
    runner.order, runner.gate = [], asyncio.Event()
    try:
        async with asyncio.timeout(30):
            yield runner, store
    finally:
        await runner.stop()
        await redis.aclose()


async def reached(store: Store, job_id: str, status: JobStatus) -> None:
    while (await store.jobs.get(job_id)).status is not status:
        await asyncio.sleep(0.02)


async def test_jobs_run_one_after_the_other_and_a_cancelled_one_leaves_the_queue_at_once(
    redis_url: str, tmp_path: Path
) -> None:
    async with with_runner(redis_url, tmp_path) as (runner, store):
        first, second, third = [(await store.jobs.create(SPEC))[0].id for _ in range(3)]
        await runner.start()
        await reached(store, first, JobStatus.RUNNING)
        await store.jobs.request(second, "cancel")
        await runner.notify()
        await reached(store, second, JobStatus.CANCELLED)
        assert (await store.jobs.get(third)).status is JobStatus.QUEUED
        runner.gate.set()
        await reached(store, third, JobStatus.SUCCEEDED)
        assert runner.order == [first, third]


async def test_as_many_jobs_run_as_trainers_have_places(redis_url: str, tmp_path: Path) -> None:
    """In one pool or in several; a third waits, and says for what."""
    async with with_runner(redis_url, tmp_path, LocalLauncher(tmp_path)) as (runner, store):
        first, second = [(await store.jobs.create(SPEC))[0].id for _ in range(2)]
        elsewhere, _ = await store.jobs.create(SPEC.model_copy(update={"rollout": RolloutPart(pool="wide")}))
        await runner.start()
        await reached(store, first, JobStatus.RUNNING)
        await reached(store, second, JobStatus.RUNNING)
        while "it waits for 1 of the 2 places" not in (await store.jobs.get(elsewhere.id)).reason:
            await asyncio.sleep(0.02)
        runner.gate.set()
        await reached(store, elsewhere.id, JobStatus.SUCCEEDED)
        assert (set(runner.order[:2]), runner.order[2:]) == ({first, second}, [elsewhere.id])


OTHER_RELEASE = {
    "format": {"format": str(FORMAT + 1)},
    "wish": {"desired": "dreaming"},
    "spec": {"spec": SPEC.model_dump_json().replace('"flow_grpo"', '"loss_of_tomorrow"')},
}


@pytest.mark.parametrize("fields", OTHER_RELEASE.values(), ids=OTHER_RELEASE)
async def test_a_job_of_another_release_waits_and_others_of_its_pool_run(
    redis_url: str, tmp_path: Path, fields: dict[str, str]
) -> None:
    async with with_runner(redis_url, tmp_path) as (runner, store):
        theirs, ours = [(await store.jobs.create(SPEC))[0].id for _ in range(2)]
        await store.jobs.set_status(theirs, JobStatus.RUNNING)
        await store.link.redis.hset(keys.job(theirs), mapping=fields)
        await runner.start()
        await reached(store, ours, JobStatus.RUNNING)
        shown = await store.jobs.get(theirs)
        assert (shown.status, shown.is_unreadable) == (JobStatus.RUNNING, True)
        await store.jobs.request(theirs, "cancel")
        await reached(store, theirs, JobStatus.CANCELLED)
        assert runner.order == [ours]


async def test_the_release_that_can_read_a_job_takes_it_up(redis_url: str, tmp_path: Path) -> None:
    async with with_runner(redis_url, tmp_path) as (runner, store):
        first, second = [(await store.jobs.create(SPEC))[0].id for _ in range(2)]
        for job_id in (first, second):
            await store.jobs.set_status(job_id, JobStatus.QUEUED, f"{UNREADABLE}: it was rolled back")
        await runner.start()
        await reached(store, first, JobStatus.RUNNING)
        assert (await store.jobs.get(first)).reason == ""
        assert UNREADABLE not in (await store.jobs.get(second)).reason
        runner.gate.set()
        await reached(store, second, JobStatus.SUCCEEDED)


async def test_a_crash_of_the_driver_is_survived(redis_url: str, tmp_path: Path) -> None:
    async with with_runner(redis_url, tmp_path) as (runner, store):
        runner.crashes = 1
        runner.gate.set()
        job, _ = await store.jobs.create(SPEC)
        await runner.start()
        await reached(store, job.id, JobStatus.SUCCEEDED)
        assert runner.order == [job.id, job.id]


async def test_data_that_cannot_be_read_now_are_tried_again(redis_url: str, tmp_path: Path) -> None:
    async with with_runner(redis_url, tmp_path) as (runner, store):
        runner.crashes, runner.error = 1, Unread("s3://b/t.txt: prompts cannot be read: SlowDown")
        runner.gate.set()
        job, _ = await store.jobs.create(SPEC)
        await runner.start()
        await reached(store, job.id, JobStatus.SUCCEEDED)
        assert runner.order == [job.id, job.id]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "RESTART_DELAY_S", 0.01)
    monkeypatch.setattr(job_runner, "MAX_CRASHES", 2)
    monkeypatch.setattr(launcher, "STOP_DELAY_S", 0.01)


@pytest.mark.usefixtures("soon")
async def test_data_that_stay_unreadable_pause_the_job_with_their_reason(redis_url: str, tmp_path: Path) -> None:
    async with with_runner(redis_url, tmp_path) as (runner, store):
        runner.crashes, runner.error = 2, Unread("s3://b/t.txt: prompts cannot be read: SlowDown")
        runner.gate.set()
        job, _ = await store.jobs.create(SPEC)
        await runner.start()
        await reached(store, job.id, JobStatus.PAUSED)
        reason = (await store.jobs.get(job.id)).reason
        assert reason == "s3://b/t.txt: prompts cannot be read: SlowDown; then `flowfleet resume` the job"
        await store.jobs.request(job.id, "resume")
        await reached(store, job.id, JobStatus.SUCCEEDED)


@pytest.mark.usefixtures("soon")
async def test_who_resumes_before_the_data_are_there_has_the_job_paused_again(redis_url: str, tmp_path: Path) -> None:
    async with with_runner(redis_url, tmp_path) as (runner, store):
        runner.opens, runner.crashes, runner.error = False, 1, Unopened("/data/t.txt: is not there")
        runner.gate.set()
        job, _ = await store.jobs.create(SPEC)
        await runner.start()
        for opened in (1, 2, 3):
            while len(runner.order) < opened or (await store.jobs.get(job.id)).desired is not Desired.PAUSED:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert len(runner.order) == opened
            runner.crashes = 3 - opened
            await store.jobs.request(job.id, "resume")
        await reached(store, job.id, JobStatus.SUCCEEDED)


@pytest.mark.usefixtures("soon")
async def test_a_trainer_that_cannot_be_ended_ends_nothing_else(redis_url: str, tmp_path: Path) -> None:
    refusing = RefusingLauncher(tmp_path, places=1)
    async with with_runner(redis_url, tmp_path, refusing) as (runner, store):
        runner.crashes = 2
        runner.gate.set()
        first, second = [(await store.jobs.create(SPEC))[0].id for _ in range(2)]
        await runner.start()
        await reached(store, first, JobStatus.FAILED)
        assert (await store.jobs.get(first)).reason == "controller error: RuntimeError: a bug of ours"
        assert refusing.tries == launcher.STOP_TRIES
        await reached(store, second, JobStatus.SUCCEEDED)
        assert runner.alive


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("error", "lasts_s"), [(Unavailable("no answer"), 0.0), (RuntimeError("a bug of ours"), 0.1)])
async def test_who_is_away_is_no_crash_and_those_of_long_ago_do_not_count(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, lasts_s: float
) -> None:
    monkeypatch.setattr(job_runner, "STEADY_S", 0.05)
    async with with_runner(redis_url, tmp_path) as (runner, store):
        runner.crashes, runner.error, runner.lasts_s = 4, error, lasts_s
        runner.gate.set()
        job, _ = await store.jobs.create(SPEC)
        await runner.start()
        await reached(store, job.id, JobStatus.SUCCEEDED)
        assert runner.order == [job.id] * 5


async def test_a_look_that_fails_is_followed_by_another(redis_url: str, tmp_path: Path) -> None:
    async with with_runner(redis_url, tmp_path) as (runner, store):
        runner.gate.set()
        await runner._redis.zadd(keys.jobs_with_status(JobStatus.QUEUED), {"lost": time.time()})
        await runner.start()
        await asyncio.sleep(0.3)
        assert runner.alive
        await runner._redis.zrem(keys.jobs_with_status(JobStatus.QUEUED), "lost")
        job, _ = await store.jobs.create(SPEC)
        await reached(store, job.id, JobStatus.SUCCEEDED)


async def test_a_runner_that_ends_by_itself_is_not_alive_and_says_so(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> None:
        raise RuntimeError("a bug of ours")

    async with with_runner(redis_url, tmp_path) as (runner, _):
        monkeypatch.setattr(runner, "_run", broken)
        await runner.start()
        await until(lambda: not runner.alive)
        assert "scheduler ended" in caplog.text


@pytest.mark.parametrize("part", ["listen", "_tell_load", "_drive"])
async def test_it_stops_though_a_part_loses_its_cancellation(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Python 3.11 may lose one in `asyncio.wait_for`: in a task of the scheduler, of the leader, and in a driver."""
    waits = asyncio.Event()

    async def stubborn(*_: object) -> None:
        waits.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    monkeypatch.setattr(concurrency, "CANCEL_AGAIN_S", 0.05)
    monkeypatch.setattr(scheduler if part == "listen" else WaitingRunner, part, stubborn)
    async with with_runner(redis_url, tmp_path) as (runner, store):
        await store.jobs.create(SPEC)
        await runner.start()
        await asyncio.wait_for(waits.wait(), 10)
        await asyncio.wait_for(runner.stop(), 5)
        assert not [task for task in asyncio.all_tasks() if task.get_name() in ("keeper", "leadership", "jobs")]


async def test_only_a_lost_lease_is_more_than_a_trainer_that_was_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that starts a new trainer continues: it gets its position again."""
    refusing = RefusingLauncher(tmp_path)
    assert not await stopped(refusing, "job")
    assert await stopped(LocalLauncher(tmp_path), "job")

    async def lost(_: str, **__: bool) -> None:
        raise LeaseLost

    monkeypatch.setattr(refusing, "stop", lost)
    with pytest.raises(LeaseLost):
        await stopped(refusing, "job")
