"""Lending replicas out, and what the watch learns from Redis and from replicas themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple

import grpc
import pytest

from flowfleet.api.fleet import Health
from flowfleet.data import replicas
from flowfleet.data.replicas import ReplicaDirectory, ReplicaRecord
from flowfleet.proto import rollout_pb2, rollout_pb2_grpc
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.fleet import watch as fleet_watch
from services.controller.fleet.replicas import Fleet
from services.controller.fleet.watch import FleetWatch, NobodyThere, ReplicaQueue, Want
from tests.services.controller.fleet.test_replicas import fleet_of, record
from tests.serving import started
from tests.waiting import until

WANT = Want(3, 3, limit=2)


def waits(desk: ReplicaQueue, want: Want = WANT, samples: int = 2) -> asyncio.Task[Any]:
    return asyncio.create_task(desk.take("job", want, samples))


def loads(fleet: Fleet) -> dict[str, int]:
    return {replica.replica_id: replica.outstanding for replica in fleet.all()}


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_who_came_first_is_served_first_and_others_wants_do_not_hold_it_up() -> None:
    fleet = fleet_of("a", "b")
    desk = ReplicaQueue(fleet)
    impossible = waits(desk, Want(9, 9, limit=2))
    first, second, third, fourth = (waits(desk) for _ in range(4))
    await settled()
    assert {first.result().replica_id, second.result().replica_id} == {"a", "b"}
    assert not third.done()
    desk.give_back("job", second.result(), 2)
    await settled()
    assert third.result().replica_id == second.result().replica_id
    assert not fourth.done()
    assert loads(fleet) == {"a": 2, "b": 2}
    fleet.update([record("c")])
    desk.serve_touched()
    await settled()
    assert fourth.result().replica_id == "c"
    assert not impossible.done()
    impossible.cancel()


async def test_who_wants_an_older_version_is_served_before_those_who_came_earlier() -> None:
    """A request of the step that trains next, whose first replica gave way to an update, is asked for again."""
    fleet = fleet_of("a")
    desk = ReplicaQueue(fleet)
    first = waits(desk)
    await settled()
    later_step, older_step = waits(desk, Want(3, 4, limit=2)), waits(desk, Want(2, 3, limit=2))
    await settled()
    desk.give_back("job", first.result(), 2)
    await settled()
    assert older_step.done()
    assert not later_step.done()
    later_step.cancel()


async def test_one_who_gives_up_leaves_nothing_behind() -> None:
    fleet = fleet_of("a")
    desk = ReplicaQueue(fleet)
    first = waits(desk)
    await settled()
    second, third = waits(desk), waits(desk)
    await settled()
    second.cancel()
    await settled()
    desk.give_back("job", first.result(), 2)
    third.cancel()  # it has been given the replica, and does not know yet
    await settled()
    assert third.cancelled()
    assert loads(fleet) == {"a": 0}
    assert desk._waiting == {}


class Answers(rollout_pb2_grpc.RolloutServiceServicer):
    """Serves a version, and counts who asks."""

    asked = 0
    version = 3

    async def GetStatus(self, request: Any, context: Any) -> rollout_pb2.RolloutStatus:
        self.asked += 1
        return rollout_pb2.RolloutStatus(
            state=rollout_pb2.ROLLOUT_STATE_SERVING, job_id="job", policy_version=self.version, incarnation="1"
        )


class Watched(NamedTuple):
    """A watch, and a replica that answers it."""

    watch: FleetWatch
    directory: ReplicaDirectory
    service: Answers
    said: ReplicaRecord
    server: grpc.aio.Server


@pytest.fixture
async def watched(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(replicas, "STALE_S", 0.4)
    monkeypatch.setattr(replicas, "EXPIRES_S", 2.0)
    redis, service = connect(redis_url), Answers()
    server, address = await started(service)
    watch = FleetWatch(redis, poll_s=0.05)
    await watch.start()
    yield Watched(watch, ReplicaDirectory(redis), service, record("a", address=address), server)
    await watch.stop()
    await server.stop(None)
    await redis.aclose()


def health(watch: FleetWatch) -> Health | None:
    known = watch.fleet.get("a")
    return known.health if known else None


async def test_a_record_is_believed_and_nobody_is_asked(watched: Watched) -> None:
    watch, directory, service, said, _ = watched
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(watch._desk.take("job", WANT, 2))
        await directory.put(said)
    assert waiting.result().address == said.address
    for state in ("updating", "serving"):
        await directory.put(replace(said, state=state))
        await until(lambda state=state: health(watch) == state)  # type: ignore[misc]
    await directory.remove(said)
    await until(lambda: len(watch.fleet) == 0)
    assert service.asked == 0


async def test_one_that_is_not_renewed_is_asked_and_serves_on_until_it_expires(
    watched: Watched,
) -> None:
    watch, directory, service, said, _ = watched
    await directory.put(said)
    await until(lambda: service.asked > 2)
    assert health(watch) is Health.SERVING
    service.version = 4
    await until(lambda: watch.fleet.choose("job", 4, 4, 1) is not None)
    await until(lambda: len(watch.fleet) == 0)


async def test_an_idle_one_that_died_is_lost_before_it_expires(watched: Watched) -> None:
    watch, directory, _, said, server = watched
    await directory.put(said)
    await until(lambda: health(watch) is Health.SERVING)
    await server.stop(None)
    await until(lambda: health(watch) is not Health.SERVING)
    if health(watch) is not None:
        await directory.put(replace(said, incarnation="2", state="idle"), joins=True)
        await until(lambda: health(watch) is Health.IDLE)


async def test_a_broken_call_loses_it_until_it_answers_though_its_record_is_renewed(
    watched: Watched,
) -> None:
    watch, directory, service, said, _ = watched
    await directory.put(said)
    metadata = grpc.aio.Metadata()
    broken = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata)
    with pytest.raises(grpc.aio.AioRpcError):
        async with watch.lease(["default"], "job", WANT, 2):
            raise broken
    assert health(watch) is Health.LOST
    await until(lambda: health(watch) is Health.SERVING)
    assert service.asked >= 1
    assert watch.fleet.all()[0].outstanding == 0


async def test_an_empty_pool_is_told_and_a_busy_one_is_waited_for(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_watch, "EMPTY_S", 0.3)
    monkeypatch.setattr(fleet_watch, "EMPTY_LOOK_S", 0.05)
    watch, directory, service, said, _ = watched

    async def wait() -> None:
        async with watch.lease(["default"], "job", WANT, 2):
            return

    with pytest.raises(NobodyThere, match="no live replica in default"):
        await wait()
    assert watch._desk._waiting == {}
    await directory.put(replace(said, state="updating"))
    await until(lambda: health(watch) is Health.UPDATING)
    service.version = 2
    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0.6)
    assert not waiting.done()
    await directory.put(said)
    await waiting
    await directory.put(replace(said, version=4))
    await until(lambda: watch.fleet.choose("job", 3, 3, 2) is None)
    waiting = asyncio.create_task(wait())
    await until(lambda: watch._desk._waiting)
    await directory.remove(said)
    with pytest.raises(NobodyThere):
        await waiting


async def test_a_look_goes_on_after_whatever_it_meets(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_watch, "RETRY_S", 0.01)
    watch, directory, _, said, _ = watched
    looked = []

    async def broken(revision: int) -> None:
        looked.append(revision)
        raise KeyError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(watch._directory, "look", broken)
        await until(lambda: len(looked) > 1)
    await directory.put(said)
    await until(lambda: health(watch) is Health.SERVING)
    assert watch.alive


async def test_an_unreadable_record_hides_no_replica_and_is_not_read_again(watched: Watched, redis_url: str) -> None:
    watch, directory, _, said, _ = watched
    redis = connect(redis_url)
    other = record("b")
    await redis.hset(keys.replicas("records"), "b", "{")
    await redis.zadd(keys.replicas("renewed"), {"b": 1000 * (await redis.time())[0]})
    await redis.zadd(keys.replicas("changed"), {"b": await redis.incr(keys.replicas("revision"))})
    await directory.put(said)
    await until(lambda: health(watch) is Health.SERVING)
    await watch.refresh()
    assert ({one.replica_id for one in watch.fleet.all()}, watch._unreadable, watch._revision) == ({"a"}, {"b"}, 2)
    await directory.put(other)
    await until(lambda: len(watch.fleet) == 2)
    assert watch._unreadable == set()
    await redis.aclose()
