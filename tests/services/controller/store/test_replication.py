"""No controller leads on a Redis that lost acknowledged writes until an operator accepts it. With a primary and a
replica as processes; failovers by Sentinels are in test_redis_failover.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.concurrency import end
from services.controller.store import replication
from services.controller.store.leadership import Lease, LeaseLost
from services.controller.store.replication import NAME, Replication
from tests.flowfleet.sentinels import Pair, url_of
from tests.services.controller.conftest import Api
from tests.waiting import until

TIMES = {"ttl_s": 0.6, "renew_s": 0.2, "try_s": 0.02}


class Controller:
    """The leadership part of a controller."""

    def __init__(self, redis: Any, directory: Path, num_acks: int = 1) -> None:
        self.registry = CollectorRegistry()
        self.replication = Replication(redis, directory, num_acks, self.registry)
        self.lease = Lease(redis, self.registry, self.replication, **TIMES)
        self.works = 0
        self._task = asyncio.create_task(self.lease.run(self._work))

    async def _work(self) -> None:
        self.works += 1
        await asyncio.Event().wait()

    async def leads(self) -> None:
        await until(lambda: self.lease.held)

    async def notes(self, number: int) -> None:
        await until(lambda: self.replication.noted >= number)

    def gauge(self, name: str) -> float | None:
        return self.registry.get_sample_value(name)

    async def leave(self) -> None:
        await end([self._task])


MakeController = Callable[..., Controller]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    started = Pair(tmp_path_factory.mktemp("pair"))
    yield started
    started.kill()


@pytest.fixture
async def redis(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(replication, "PERIOD_S", 0.02)
    monkeypatch.setattr(replication, "ACK_TIMEOUT_S", 0.2)
    client = connect(url_of(pair.primary))
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
async def controller(redis: Any, tmp_path: Path) -> AsyncIterator[MakeController]:
    made: list[Controller] = []

    def make(num_acks: int = 1) -> Controller:
        made.append(Controller(redis, tmp_path / "state", num_acks))
        return made[-1]

    yield make
    await asyncio.gather(*(one.leave() for one in made))


async def goes_back(redis: Any, by: int = 1) -> None:
    """Simulates a failover to a replica without the newest writes."""
    await redis.decrby(keys.acknowledged(), by)


async def test_the_leader_notes_what_replicas_acknowledged(
    redis: Any, controller: MakeController, tmp_path: Path
) -> None:
    leader = controller()
    await leader.notes(3)
    noted = json.loads((tmp_path / "state" / NAME).read_text())
    assert 3 <= noted["number"] <= int(await redis.get(keys.acknowledged()))
    assert (leader.gauge("flowfleet_redis_lost_writes"), leader.gauge("flowfleet_redis_unacknowledged_seconds")) == (
        0,
        0,
    )
    assert [path.name for path in (tmp_path / "state").iterdir()] == [NAME]


async def test_a_leader_stops_when_redis_went_back_and_nobody_leads_until_the_loss_is_accepted(
    redis: Any, controller: MakeController, tmp_path: Path
) -> None:
    first = controller()
    await first.notes(3)
    await goes_back(redis, 2)
    await until(lambda: bool(first.replication.loss))
    second = controller()  # as one that is started meanwhile
    await until(lambda: bool(second.replication.loss))
    await asyncio.sleep(0.1)
    file = tmp_path / "state" / NAME
    for one in (first, second):
        assert not one.lease.held
        assert one.lease.trouble.startswith("Redis lost acknowledged writes: it is at number ")
        assert f"removing {file}" in one.lease.trouble
        assert one.gauge("flowfleet_redis_lost_writes") == 1
    at = int(await redis.get(keys.acknowledged()))
    assert at < json.loads(file.read_text())["number"]  # neither changes, so the loss stays visible

    file.unlink()
    await until(lambda: first.lease.held or second.lease.held)
    await until(lambda: not first.lease.trouble and not second.lease.trouble)
    leader = first if first.lease.held else second
    await leader.notes(at + 1)
    assert leader.gauge("flowfleet_redis_lost_writes") == 0


async def test_a_redis_that_gets_the_lost_writes_back_is_led_again(redis: Any, controller: MakeController) -> None:
    one = controller()
    await one.notes(2)
    await goes_back(redis)
    await until(lambda: bool(one.replication.loss))
    await redis.incrby(keys.acknowledged(), 1)
    await one.leads()
    assert (one.lease.trouble, one.works) == ("", 2)


async def test_an_emptied_redis_is_not_led(redis: Any, controller: MakeController) -> None:
    one = controller()
    await one.notes(2)
    await redis.flushall()
    await until(lambda: "it is at number 0" in one.lease.trouble)
    assert not one.lease.held


async def test_no_fenced_write_is_made_on_a_redis_that_went_back(
    redis: Any, controller: MakeController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the leader looks again."""
    one = controller()
    await one.notes(2)
    monkeypatch.setattr(replication, "PERIOD_S", 60.0)
    await asyncio.sleep(0.1)
    await one.lease.confirm()
    await goes_back(redis, 2)

    async def fill(pipe: Any) -> None:
        pipe.multi()
        pipe.set("written", "x")

    with pytest.raises(LeaseLost):
        await one.lease.transaction(fill)
    with pytest.raises(LeaseLost):
        await one.lease.confirm()
    assert await redis.exists("written") == 0


async def test_what_too_few_replicas_acknowledge_is_not_noted_and_seen(
    redis: Any, controller: MakeController, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = controller(num_acks=2)
    await until(lambda: (one.gauge("flowfleet_redis_unacknowledged_seconds") or 0) > 0.2)
    assert (one.lease.held, one.lease.trouble) == (True, "")
    assert not (tmp_path / "state" / NAME).exists()
    assert [record.message for record in caplog.records if "failover" in record.message] == [
        "a failover could lose Redis's newest writes: 1 of 2 replicas acknowledged"
    ]
    await goes_back(redis, 2)  # which no replica had acknowledged
    await asyncio.sleep(0.1)
    assert one.lease.held


async def test_without_acknowledgments_a_redis_is_led_whatever_it_holds(
    redis: Any, controller: MakeController, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / NAME).write_text('{"number": 9, "at": "then"}')
    one = controller(num_acks=0)
    await one.leads()
    assert await redis.exists(keys.acknowledged()) == 0


async def test_a_damaged_file_keeps_from_leading_and_says_so(controller: MakeController, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / NAME).write_text("{")
    one = controller()
    await until(lambda: "is damaged; remove it if Redis lost no writes" in one.lease.trouble)
    (tmp_path / "state" / NAME).unlink()
    await one.leads()


async def test_a_successor_on_the_side_of_a_stale_primary_stops(
    redis: Any, controller: MakeController, tmp_path: Path
) -> None:
    """Another controller leads elsewhere, with a newer primary, and shares the file."""
    one = controller()
    await one.notes(2)
    (tmp_path / "state" / NAME).write_text(json.dumps({"number": 1000, "at": "now"}))
    await until(lambda: "its replicas had 1000 at now" in one.lease.trouble)
    assert not one.lease.held


async def test_rest_tells_the_loss_and_takes_no_job(api: Api, job: Callable[..., dict[str, Any]]) -> None:
    record = await api.submit(job())
    runner: Any = api.services.runner
    runner.trouble = runner.loss = "Redis lost acknowledged writes"
    answer = await api.client.post("/v1/jobs", json=job())
    assert (answer.status_code, answer.json()["detail"]) == (503, runner.loss)
    assert (await api.client.get(f"/v1/jobs/{record['id']}")).json()["reason"] == f"the job waits: {runner.loss}"
    assert (await api.client.get("/v1/fleet")).json()["shortages"] == [
        {"component": "redis", "name": "primary", "reason": runner.loss}
    ]
    assert (await api.client.get("/healthz")).status_code == 200
