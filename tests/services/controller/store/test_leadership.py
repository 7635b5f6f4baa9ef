"""The lease with a real Redis: who leads, whose writes count, and how soon another one takes over."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from flowfleet.api.jobs import JobStatus
from flowfleet.job.spec import parse_job
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.concurrency import end
from services.controller.job.machine import events as ev
from services.controller.job.machine.ledger import Ledger
from services.controller.job.machine.state import State
from services.controller.platforms.job_users import JobUsers
from services.controller.platforms.launcher import FencedLauncher
from services.controller.store import leadership
from services.controller.store.leadership import TRY_S, Lease, LeaseLost
from services.controller.store.store import Store
from tests.services.controller.places import Places
from tests.waiting import until

SPEC = parse_job({"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}})
TTL_S, RENEW_S = 0.6, 0.2


class Contender:
    """A controller as far as leadership goes."""

    def __init__(self, redis: Any, **times: float) -> None:
        self.registry = CollectorRegistry()
        settings: dict[str, Any] = {"ttl_s": TTL_S, "renew_s": RENEW_S, "try_s": 0.02}
        self.lease = Lease(redis, self.registry, **settings | times)
        self.works = 0
        self._task = asyncio.create_task(self.lease.run(self._work))

    async def _work(self) -> None:
        self.works += 1
        await asyncio.Event().wait()

    async def leads(self) -> None:
        await until(lambda: self.lease.held)

    async def follows(self) -> None:
        await until(lambda: not self.lease.held)

    @property
    def gauge(self) -> float | None:
        return self.registry.get_sample_value("flowfleet_controller_leader")

    async def leave(self) -> None:
        await end([self._task])

    def suspend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Does not renew; nothing else of it changes."""

        async def nothing() -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(self.lease, "_call", lambda *_: nothing())


MakeContender = Callable[..., Contender]


@pytest.fixture
async def contender(redis: Any) -> AsyncIterator[MakeContender]:
    made: list[Contender] = []

    def make(**times: float) -> Contender:
        made.append(Contender(redis, **times))
        return made[-1]

    yield make
    await asyncio.gather(*(one.leave() for one in made))


async def test_one_leads_and_renews_and_the_other_takes_over_when_it_leaves(
    redis: Any, contender: MakeContender
) -> None:
    first = contender()
    await first.leads()
    second = contender(try_s=TRY_S)
    await asyncio.sleep(2 * TTL_S)
    assert (first.lease.held, second.lease.held, second.works) == (True, False, 0)
    assert (first.gauge, second.gauge) == (1.0, 0.0)
    await first.lease.confirm()
    left = time.monotonic()
    await first.leave()
    await asyncio.wait_for(second.leads(), 5)
    assert time.monotonic() - left < 1.0
    assert (first.gauge, second.gauge) == (0.0, 1.0)
    with pytest.raises(LeaseLost):
        await first.lease.confirm()


async def test_a_lease_that_is_not_renewed_runs_out_and_its_holder_may_write_nothing_any_more(
    redis: Any, contender: MakeContender, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = contender()
    await first.leads()
    second = contender()
    job, _ = await Store(redis).jobs.create(SPEC)
    ledger, launched = Ledger(redis, first.lease, job.id), Launched()
    await ledger.append([ev.PauseRequested()])
    first.suspend(monkeypatch)
    began = time.monotonic()
    await asyncio.wait_for(second.leads(), 5)
    assert 0.2 < time.monotonic() - began < TTL_S + RENEW_S + 0.5
    assert first.lease.held  # as far as it knows

    async def also(pipe: Any) -> None:
        pipe.set("elsewhere", "x")

    writes: list[Callable[[], Awaitable[Any]]] = [
        lambda: ledger.append([ev.CancelRequested()], also),
        lambda: ledger.snapshot(State()),
        lambda: Store(redis).fenced_by(first.lease).jobs.set_status(job.id, JobStatus.FAILED),
        lambda: FencedLauncher(launched, first.lease, JobUsers(redis)).ensure(job.id, SPEC),
        lambda: FencedLauncher(launched, first.lease, JobUsers(redis)).stop(job.id),
    ]
    for write in writes:
        with pytest.raises(LeaseLost):
            await write()
    restored = await Ledger(redis, second.lease, job.id).restore(SPEC)
    assert (str(restored.state.status), await redis.exists("elsewhere"), launched.calls) == ("paused", 0, [])
    assert (await Store(redis).jobs.get(job.id)).status is JobStatus.QUEUED


async def test_another_that_takes_over_within_a_transaction_undoes_it(redis: Any, contender: MakeContender) -> None:
    first = contender()
    await first.leads()

    async def fill(pipe: Any) -> None:
        await redis.set(keys.leader_term(), "another's")
        pipe.multi()
        pipe.set("written", "x")

    with pytest.raises(LeaseLost):
        await first.lease.transaction(fill)
    assert await redis.exists("written") == 0


async def test_who_finds_another_in_its_place_follows_and_may_lead_again(redis: Any, contender: MakeContender) -> None:
    first = contender()
    await first.leads()
    await redis.set(keys.leader(), json.dumps({"place": "elsewhere", "pid": 1, "started": "1"}), px=700)
    await redis.set(keys.leader_term(), "another's")
    await asyncio.wait_for(first.follows(), 5)
    await asyncio.wait_for(first.leads(), 5)
    assert first.works == 2
    await first.lease.confirm()


async def test_a_lease_that_ran_out_with_nobody_else_is_kept(redis: Any, contender: MakeContender) -> None:
    """Such an outage of Redis is longer than the lease."""
    first = contender()
    await first.leads()
    await redis.delete(keys.leader())
    await first.lease.confirm()
    await asyncio.sleep(2 * RENEW_S)
    assert (first.works, await redis.exists(keys.leader())) == (1, 1)


async def test_an_emptied_redis_is_led_again(redis: Any, contender: MakeContender) -> None:
    first = contender()
    await first.leads()
    await redis.flushall()
    await until(lambda: first.works >= 2)
    await first.leads()
    await first.lease.confirm()


async def test_a_successor_on_this_machine_does_not_wait_for_its_dead_predecessor(
    redis: Any, redis_url: str, contender: MakeContender
) -> None:
    code = "from tests.services.controller.store.test_leadership import lead_and_die; lead_and_die()"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env={**os.environ, "URL": redis_url})
    await process.wait()
    assert await redis.pttl(keys.leader()) > 50_000
    began = time.monotonic()
    await asyncio.wait_for(contender(ttl_s=60.0).leads(), 5)
    assert time.monotonic() - began < 0.5


def lead_and_die() -> None:
    async def main() -> None:
        contender = Contender(connect(os.environ["URL"]), ttl_s=60.0)
        await contender.leads()
        os.kill(os.getpid(), 9)

    asyncio.run(main())


def test_only_a_process_that_would_be_seen_here_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = leadership._this_process()
    dead = {**here, "pid": ended.pid}

    def judge(who: dict[str, Any]) -> bool:
        return leadership._is_dead(json.dumps(who).encode())

    assert judge(dead)
    assert judge({**here, "started": "1"})  # another process has its pid by now
    assert not judge(here)
    assert not judge({**dead, "place": "another machine, or another container"})
    monkeypatch.setattr(leadership, "_place", lambda: "")
    assert not judge({**dead, "place": ""})


class Launched(Places):
    """A launcher that notes its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    async def ensure(self, job_id: str, spec: Any) -> str:
        self.calls.append(job_id)
        return "127.0.0.1:1"

    async def alive(self, job_id: str) -> bool:
        return True

    def placed(self, job_id: str) -> bool:
        return True

    async def termination_message(self, job_id: str) -> str:
        return ""

    async def keep_only(self, job_ids: Collection[str]) -> None:
        self.calls.extend(job_ids)

    async def ended(self, job_id: str) -> None:
        return

    async def stop(self, job_id: str, *, at_once: bool = False) -> None:
        self.calls.append(job_id)
