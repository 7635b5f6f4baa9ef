"""The trajectory stream on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from flowfleet.data import streams
from flowfleet.data.streams import TrajectoryConsumer, TrajectoryStream
from flowfleet.proto.common_pb2 import Sample, SampleId
from flowfleet.redis import keys
from flowfleet.redis.client import connect

JOB = "job1"
KEY = keys.trajectories(JOB)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect(redis_url) as client:
        yield client


def sample(index: int) -> Sample:
    return Sample(id=SampleId(job_id=JOB, step=3, group=1, index=index), seed=2**63 + index)


async def publish(client: redis.asyncio.Redis, count: int, start: int = 0) -> list[str]:
    stream = TrajectoryStream(client, JOB)
    return [await stream.publish(sample(index)) for index in range(start, start + count)]


def consumer(client: redis.asyncio.Redis, name: str = "a", **settings: Any) -> TrajectoryConsumer:
    return TrajectoryConsumer(client, JOB, consumer=name, **settings)


async def entries(client: redis.asyncio.Redis, name: str) -> Any:
    """Entries of a stream: (id, fields) each, in bytes."""
    return await client.xrange(name)


async def num_pending(client: redis.asyncio.Redis) -> int:
    return int((await client.xpending(KEY, "controller"))["pending"])


def indices(deliveries: list[streams.Delivery]) -> list[int]:
    return [delivery.sample.id.index for delivery in deliveries]


async def test_samples_arrive_once_and_in_order(client: redis.asyncio.Redis) -> None:
    entry_ids = await publish(client, 5)
    reader = consumer(client)
    first, second = await reader.read(3, 50), await reader.read(3, 50)
    assert [delivery.entry_id for delivery in first + second] == entry_ids
    assert [delivery.sample for delivery in first + second] == [sample(index) for index in range(5)]
    assert {delivery.deliveries for delivery in first + second} == {1}
    assert await reader.read(3, 10) == []


async def test_a_group_made_late_misses_nothing_and_consumers_share(client: redis.asyncio.Redis) -> None:
    await publish(client, 4)
    first, second = consumer(client, "a"), consumer(client, "b")
    assert indices(await first.read(2, 50)) + indices(await second.read(2, 50)) == [0, 1, 2, 3]
    other_group = consumer(client, "a", group="watcher")
    assert indices(await other_group.read(10, 50)) == [0, 1, 2, 3]


async def test_read_waits_for_the_first_entry(client: redis.asyncio.Redis) -> None:
    reading = asyncio.create_task(consumer(client).read(8, 5000))
    await asyncio.sleep(0.2)
    assert not reading.done()
    await publish(client, 1)
    assert indices(await asyncio.wait_for(reading, 2)) == [0]


@pytest.mark.parametrize("block_ms", [0, -1, 20_001])
async def test_a_block_that_would_outlast_the_socket_is_refused(client: redis.asyncio.Redis, block_ms: int) -> None:
    with pytest.raises(ValueError, match="block_ms"):
        await consumer(client).read(1, block_ms)


async def test_an_entry_stays_pending_until_its_effect_is_stored(client: redis.asyncio.Redis) -> None:
    """Effect and acknowledgment are one transaction: both or neither."""
    await publish(client, 2)
    reader = consumer(client)
    first, second = await reader.read(2, 50)
    assert await num_pending(client) == 2
    await client.set("not-a-number", "x")
    async with client.pipeline(transaction=True) as pipe:
        pipe.set("effect", 1)
        await reader.ack([first.entry_id], pipe)
        assert await num_pending(client) == 2  # queued, not done
        await pipe.execute()
    assert (await client.get("effect"), await num_pending(client)) == (b"1", 1)
    async with client.pipeline(transaction=True) as pipe:
        await reader.ack([second.entry_id], pipe)  # never executed: the process died here
    assert await num_pending(client) == 1
    await reader.ack([second.entry_id])
    await reader.ack([second.entry_id])
    await reader.ack([])
    assert await num_pending(client) == 0


async def test_entries_of_a_dead_consumer_are_reclaimed(client: redis.asyncio.Redis) -> None:
    await publish(client, 3)
    dead, alive = consumer(client, "dead"), consumer(client, "alive", reclaim_idle_ms=150)
    taken = await dead.read(3, 50)
    await dead.ack([taken[0].entry_id])
    assert await alive.reclaim() == []  # not idle long enough
    await asyncio.sleep(0.2)
    reclaimed = await alive.reclaim()
    assert indices(reclaimed) == [1, 2]
    assert {delivery.deliveries for delivery in reclaimed} == {2}
    assert await alive.reclaim() == []  # the clock of those entries started again
    await alive.ack([delivery.entry_id for delivery in reclaimed])
    await asyncio.sleep(0.2)
    assert await alive.reclaim() == []
    assert await num_pending(client) == 0


async def test_a_restarted_consumer_gets_its_own_entries_back_at_once(client: redis.asyncio.Redis) -> None:
    await publish(client, 5)
    await consumer(client).read(5, 50)
    again = consumer(client)
    parts = [await again.reclaim(2, min_idle_ms=0)]
    assert indices(parts[0]) == [0, 1]
    await again.ack([delivery.entry_id for delivery in parts[0]])
    assert indices(await again.reclaim(100, min_idle_ms=0)) == [2, 3, 4]


async def test_two_reclaimers_never_get_the_same_entry(client: redis.asyncio.Redis) -> None:
    await publish(client, 40)
    await consumer(client, "dead").read(40, 50)
    await asyncio.sleep(0.15)
    rivals = [consumer(client, f"rival{index}", reclaim_idle_ms=100) for index in range(4)]
    taken = await asyncio.gather(*(rival.reclaim(40) for rival in rivals))
    assert sorted(index for part in taken for index in indices(part)) == list(range(40))


async def test_after_five_deliveries_an_entry_is_dead_lettered(client: redis.asyncio.Redis) -> None:
    [entry_id] = await publish(client, 1)
    reader = consumer(client)
    counts = [(await reader.read(1, 50))[0].deliveries]
    while deliveries := await reader.reclaim(min_idle_ms=0):
        counts.append(deliveries[0].deliveries)
    assert counts == [1, 2, 3, 4, 5]
    [(_, fields)] = await entries(client, keys.dead_trajectories(JOB))
    assert Sample.FromString(fields[b"sample"]) == sample(0)
    assert fields[b"entry_id"] == entry_id.encode()
    assert fields[b"reason"] == b"delivered 5 times without being acknowledged"
    assert await num_pending(client) == 0


@pytest.mark.parametrize("fields", [{"sample": b"\xff\xff\xff"}, {"other": b"1"}])
async def test_an_undecodable_entry_is_dead_lettered_and_the_others_arrive(
    client: redis.asyncio.Redis, fields: dict[str, bytes]
) -> None:
    await publish(client, 1)
    bad = await client.xadd(KEY, dict[Any, Any](fields))
    await publish(client, 1, start=1)
    assert indices(await consumer(client).read(10, 50)) == [0, 1]
    [(_, dead)] = await entries(client, keys.dead_trajectories(JOB))
    assert dead[b"entry_id"] == bad
    assert dead[b"reason"].startswith(b"not a sample")
    assert fields.items() <= {name.decode(): value for name, value in dead.items()}.items()
    assert await num_pending(client) == 2


async def test_an_undecodable_entry_of_a_dead_consumer_too(client: redis.asyncio.Redis) -> None:
    await publish(client, 1)
    await consumer(client).read(1, 50)
    await client.xadd(KEY, {"x": "y"})
    await client.xreadgroup("controller", "dead", {KEY: ">"})
    assert indices(await consumer(client, "b").reclaim(min_idle_ms=0)) == [0]
    assert await client.xlen(keys.dead_trajectories(JOB)) == 1


async def test_a_consumer_can_bury_what_it_cannot_use(client: redis.asyncio.Redis) -> None:
    await publish(client, 1)
    reader = consumer(client)
    [delivery] = await reader.read(1, 50)
    await reader.bury(delivery, "of another job")
    [(_, fields)] = await entries(client, keys.dead_trajectories(JOB))
    assert (Sample.FromString(fields[b"sample"]), fields[b"reason"]) == (sample(0), b"of another job")
    assert await num_pending(client) == 0


async def test_a_sample_over_16_kib_is_refused(client: redis.asyncio.Redis) -> None:
    stream = TrajectoryStream(client, JOB)
    fits = Sample(media_type="x" * (streams.MAX_ENTRY_BYTES - 3))  # a tag of 1 byte, a length of 2
    assert fits.ByteSize() == streams.MAX_ENTRY_BYTES == 16 * 1024
    await stream.publish(fits)
    with pytest.raises(ValueError, match="carry references"):
        await stream.publish(Sample(media_type=fits.media_type + "x"))
    assert await client.xlen(KEY) == 1


@pytest.mark.parametrize("how", ["alone", "in a transaction", "dead letters"])
async def test_a_consumer_trims_as_it_handles(
    client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(streams, "TRIM_EVERY", 20)
    reader, most = consumer(client), 0
    for start in range(0, 200, 10):
        await publish(client, 10, start)
        taken = await reader.read(10, 50)
        assert indices(taken) == list(range(start, start + 10))
        ids = [delivery.entry_id for delivery in taken]
        if how == "alone":
            await reader.ack(ids)
        elif how == "in a transaction":
            async with client.pipeline(transaction=True) as pipe:
                await reader.ack(ids, pipe)
                await pipe.execute()
        else:
            for delivery in taken:
                await reader.bury(delivery, "wrong")
        most = max(most, await client.xlen(KEY))
    assert most <= 20 + 10
    late = consumer(client)  # of the next controller
    await late.read(1, 50)
    assert await client.xlen(KEY) == 0


async def test_trim_removes_only_what_all_groups_acknowledged(client: redis.asyncio.Redis) -> None:
    reader, watcher = consumer(client), consumer(client, group="watcher")
    assert await reader.trim() == 0  # no stream
    entry_ids = await publish(client, 6)
    assert await reader.trim() == 0  # no group
    deliveries = await reader.read(4, 50)
    assert await reader.trim() == 0  # all pending
    await reader.ack([deliveries[0].entry_id, deliveries[2].entry_id])
    assert await reader.trim() == 1  # 1 is pending, so 2 stays too
    await reader.ack([deliveries[1].entry_id, deliveries[3].entry_id])
    await watcher.read(1, 50)  # delivered only entry 1, still pending there
    assert await reader.trim() == 0
    await watcher.ack([entry_ids[1]])
    assert await reader.trim() == 1
    await watcher.ack([delivery.entry_id for delivery in await watcher.read(10, 50)])
    assert await reader.trim() == 2
    left = [entry_id.decode() for entry_id, _ in await entries(client, KEY)]
    assert left == entry_ids[4:]  # undelivered to `reader`: never trimmed
    assert indices(await reader.read(10, 50)) == [4, 5]


async def test_trimming_while_others_publish_and_read_loses_nothing(client: redis.asyncio.Redis) -> None:
    reader, seen = consumer(client), list[int]()
    publishing = asyncio.create_task(publish(client, 300))
    while len(seen) < 300:
        deliveries = await reader.read(7, 1000)
        seen += indices(deliveries)
        acknowledge = reader.ack([delivery.entry_id for delivery in deliveries])
        await asyncio.gather(acknowledge, reader.trim(), reader.trim())
    await publishing
    assert seen == list(range(300))
    await reader.trim()
    assert await client.xlen(KEY) == 0


async def test_an_entry_deleted_while_pending_does_not_block_the_group(client: redis.asyncio.Redis) -> None:
    entry_ids = await publish(client, 2)
    await consumer(client, "dead").read(2, 50)
    await client.xdel(KEY, entry_ids[0])
    assert indices(await consumer(client).reclaim(min_idle_ms=0)) == [1]
    assert await num_pending(client) == 1


async def test_a_deleted_stream_starts_anew(client: redis.asyncio.Redis) -> None:
    await publish(client, 1)
    reader = consumer(client)
    await reader.read(1, 50)
    await client.delete(KEY)
    assert await reader.read(1, 50) == []
    await publish(client, 1, start=7)
    assert indices(await reader.read(1, 50)) == [7]
