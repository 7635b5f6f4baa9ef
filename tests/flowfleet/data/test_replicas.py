"""The directory of replicas in a real Redis: what a look sees, and who is gone."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from flowfleet.data import replicas
from flowfleet.data.replicas import ReplicaDirectory, ReplicaRecord
from flowfleet.redis import keys


def record(name: str, **said: Any) -> ReplicaRecord:
    return ReplicaRecord(name, f"{name}:1", **{"incarnation": "1", "model": "", "pool": "default", **said})


@pytest.fixture
def directory(redis: Any) -> ReplicaDirectory:
    return ReplicaDirectory(redis)


async def test_a_look_gives_what_changed_since_the_one_before_in_order(directory: ReplicaDirectory) -> None:
    empty = await directory.look()
    assert (empty.revision, empty.number, empty.changed) == (0, 0, ())
    a, b = record("a"), record("b")
    await directory.put(a)
    await directory.put(b)
    await directory.put(a)  # renewed, not changed
    look = await directory.look()
    assert (look.number, look.changed, look.stale) == (2, (a, b), frozenset())
    assert (await directory.look(look.revision)).changed == ()
    served = replace(a, state="serving", job_id="job", version=3)
    await directory.put(served)
    assert (await directory.look(look.revision)).changed == (served,)
    assert (await directory.look()).changed == (b, served)
    assert await directory.get("a") == served


async def test_many_changes_come_in_parts(
    directory: ReplicaDirectory, redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "LOOK_COUNT", 2)
    async with redis.pipeline(transaction=False) as pipe:
        for name in "abc":
            await directory.put(record(name), pipe)
        await pipe.execute()
    first = await directory.look()
    second = await directory.look(first.revision)
    assert [len(first.changed), len(second.changed), second.number] == [2, 1, 3]


async def test_one_that_leaves_is_gone_but_not_its_successor(directory: ReplicaDirectory) -> None:
    await directory.put(record("a"))
    await directory.put(record("a", incarnation="2"), joins=True)
    await directory.remove(record("a"))
    assert await directory.members() == {"a"}
    await directory.remove(record("a", incarnation="2"))
    assert await directory.members() == set()
    assert (await directory.look()).number == 0
    assert await directory.get("a") is None


async def test_one_that_wakes_after_it_was_replaced_writes_nothing(directory: ReplicaDirectory, redis: Any) -> None:
    """Neither over its successor nor when that one has left; another of its id may join."""
    old, new, third = (record("a", incarnation=incarnation) for incarnation in "123")
    assert await directory.put(old, joins=True)
    assert await directory.put(old)
    assert await directory.put(new, joins=True)
    revision = (await directory.look()).revision
    assert not await directory.put(old)
    assert await directory.get("a") == new
    assert (await directory.look()).revision == revision
    assert await directory.put(new)
    await directory.remove(new)
    assert not await directory.put(old)
    assert await directory.get("a") is None
    assert await directory.put(third, joins=True)
    assert not await directory.put(new)
    assert 0 < await redis.ttl(keys.replicas("owner", "a")) <= replicas.OWNER_S
    await redis.flushall()  # a server that lost its data takes what is there
    assert await directory.put(third)


@pytest.mark.parametrize("jump_s", [24 * 3600, -24 * 3600])
async def test_a_clock_that_jumps_forgets_nobody_who_lives(
    directory: ReplicaDirectory, redis: Any, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    """Redis's clock is not to be moved, so what it wrote is: as if it had said something else before."""
    monkeypatch.setattr(replicas, "SETTLES_S", 0.5)
    monkeypatch.setattr(replicas, "EXPIRES_S", 2.0)
    monkeypatch.setattr(replicas, "STALE_S", 1.0)
    for name in ("living", "dead"):
        await directory.put(record(name), joins=True)
    await directory.look()
    await asyncio.sleep(0.6)
    assert (await directory.look()).number == 2
    for name, score in await redis.zrange(keys.replicas("renewed"), 0, -1, withscores=True):
        await redis.zadd(keys.replicas("renewed"), {name: score - 1000 * jump_s})
    assert directory._steadiness._base_ms is not None
    directory._steadiness._base_ms -= 1000 * jump_s
    look = await directory.look()
    assert (look.number, look.stale) == (2, frozenset())
    await asyncio.sleep(0.2)
    await directory.put(record("living"))
    assert (await directory.look()).number == 2
    await asyncio.sleep(0.4)
    await directory.look()
    await directory.put(record("living"))
    assert await directory.members() == {"living"}
    assert (await directory.look()).stale == frozenset()


async def test_one_that_is_not_renewed_is_stale_and_then_gone(
    directory: ReplicaDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "STALE_S", 0.2)
    monkeypatch.setattr(replicas, "EXPIRES_S", 0.6)
    monkeypatch.setattr(replicas, "SETTLES_S", 0.0)
    await directory.put(record("a"))
    assert (await directory.look()).stale == frozenset()
    await asyncio.sleep(0.3)
    await directory.put(record("b"))
    assert (await directory.look()).stale == {"a"}
    await asyncio.sleep(0.4)
    assert await directory.members() == {"a", "b"}
    assert [one.replica_id for one in (await directory.look()).changed] == ["b"]
    assert await directory.members() == {"b"}


async def test_a_server_that_lost_its_data_is_read_from_the_start(directory: ReplicaDirectory, redis: Any) -> None:
    for name in "abc":
        await directory.put(record(name))
    look = await directory.look()
    await redis.flushdb()
    await directory.put(record("a"))
    again = await directory.look(look.revision)
    assert (again.number, again.changed, again.revision) == (1, (record("a"),), 1)


async def put_text(directory: ReplicaDirectory, redis: Any, name: str, text: str) -> None:
    """Writes text like a replica of another version might."""
    await directory.put(record(name))
    await redis.hset(keys.replicas("records"), name, text)


def test_what_a_newer_replica_says_beside_is_passed_over() -> None:
    known = record("a", version=3)
    assert ReplicaRecord.from_json(json.dumps({**json.loads(known.to_json()), "mood": "fine"})) == known


def b_but(**said: Any) -> str:
    return json.dumps({**json.loads(record("b").to_json()), **said})


BROKEN = ["{", "[]", "{}", '{"replica_id": "b"}', b_but(pool=None)]
HOSTILE = [
    "[" * 9000,  # too deep for a parser
    b_but(pool="\ud800"),  # no message, log or metric can carry these
    b_but(pool="a\nb\x1b[2J"),
    b_but(version=2**64),
    b_but(samples_total=-1),
    b_but(model="a" * 20_000),
    b_but(replica_id="c"),  # speaks for another
]


@pytest.mark.parametrize("text", BROKEN + HOSTILE, ids=range(len(BROKEN + HOSTILE)))
async def test_a_record_that_cannot_be_read_hides_no_other(
    directory: ReplicaDirectory, redis: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    await put_text(directory, redis, "b", text)
    await directory.put(record("c"))
    look = await directory.look()
    assert (look.number, look.changed, look.unreadable) == (2, (record("c"),), frozenset("b"))
    assert "replica 'b' ignored" in caplog.text


async def test_a_name_that_is_no_text_hides_no_other(directory: ReplicaDirectory, redis: Any) -> None:
    await directory.put(record("c"))
    await redis.hset(keys.replicas("records"), b"\xff", "{}")
    for part, score in (("changed", 1), ("renewed", 1)):
        await redis.zadd(keys.replicas(part), {b"\xff": score})
    look = await directory.look()
    assert (look.number, look.changed, look.unreadable) == (2, (record("c"),), frozenset({"\\xff"}))
    assert (await directory.look()).stale == {"\\xff"}  # judged from the second look on
    assert await directory.members() == {"c", "\\xff"}
