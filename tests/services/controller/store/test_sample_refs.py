"""What a job holds of the steps that no checkpoint covers, against a real Redis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

import pytest

from flowfleet.data.blobs import RedisBlobs
from flowfleet.proto import common_pb2, trainer_pb2
from flowfleet.redis import keys
from services.controller.store.sample_refs import SampleRefs

JOB = "job"
SHARED = "negative"


@pytest.fixture
def blobs(redis: Any) -> RedisBlobs:
    return RedisBlobs(redis)


async def sample(blobs: RedisBlobs, step: int, group: int, index: int) -> common_pb2.Sample:
    async def blob(*place: str | int) -> common_pb2.BlobRef:
        return await blobs.put(keys.blob(JOB, *place), b"blob", ttl_s=100)

    return common_pb2.Sample(
        id=common_pb2.SampleId(job_id=JOB, step=step, group=group, index=index),
        trajectory=await blob("trajectory", step, group, index),
        prompt_embeds=await blob("embeds", step, group),
        negative_embeds=await blob(SHARED, 0),
        media=await blob("media", step, group, index),
    )


async def write(redis: Any, *calls: Callable[..., Any]) -> None:
    async with redis.pipeline(transaction=True) as pipe:
        for call in calls:
            await call(pipe=pipe)
        await pipe.execute()


async def filled(redis: Any, blobs: RedisBlobs) -> SampleRefs:
    """Two samples of each of steps 0 and 1, with requests of step 1 and, without any sample, of step 2."""
    refs = SampleRefs(redis, blobs, JOB)
    samples = [await sample(blobs, step, 0, index) for step in (0, 1) for index in (0, 1)]
    requests = [trainer_pb2.TrainStepRequest(job_id=JOB, step=step) for step in (1, 2)]
    await write(redis, partial(refs.put, samples), *(partial(refs.put_request, request) for request in requests))
    return refs


async def test_a_covered_step_leaves_nothing_but_its_pictures(redis: Any, blobs: RedisBlobs) -> None:
    refs = await filled(redis, blobs)
    assert await refs.held() == [0, 1, 2]
    await refs.release_before(2)
    assert await refs.held() == [2]
    media = {keys.blob(JOB, "media", step, 0, index) for step in (0, 1) for index in (0, 1)}
    there = {name.decode() for name in await redis.keys("*")}
    assert there == media | {keys.blob(JOB, SHARED, 0), keys.held_steps(JOB), keys.train_request(JOB, 2)}
    await refs.release_before(3)
    there = {name.decode() for name in await redis.keys("*")}
    assert there == media | {keys.blob(JOB, SHARED, 0)}


async def test_a_store_that_fails_leaves_steps_to_the_next_checkpoint(
    redis: Any, blobs: RedisBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = await filled(redis, blobs)
    with monkeypatch.context() as broken:
        broken.setattr(blobs, "delete", AsyncMock(side_effect=OSError("stale")))
        await refs.release_before(2)
    assert await refs.held() == [0, 1, 2]
    await refs.release_before(2)
    assert await refs.held() == [2]


async def test_a_step_s_own_negative_embeds_go_with_it(redis: Any, blobs: RedisBlobs) -> None:
    refs = await filled(redis, blobs)
    own = await blobs.put(keys.blob(JOB, SHARED, 0, 7, "abc"), b"blob", ttl_s=100)
    other = await blobs.put(keys.blob(JOB, SHARED, "0abc"), b"blob", ttl_s=100)
    found = [common_pb2.Sample(id=common_pb2.SampleId(job_id=JOB, step=0, group=7, index=index)) for index in (0, 1)]
    for sample_, ref in zip(found, (own, other), strict=True):
        sample_.negative_embeds.CopyFrom(ref)
    await write(redis, partial(refs.put, found))
    await refs.release_before(1)
    assert not await redis.exists(keys.blob(JOB, SHARED, 0, 7, "abc"))
    assert await redis.exists(keys.blob(JOB, SHARED, "0abc"), keys.blob(JOB, SHARED, 0)) == 2


async def test_renewal_prolongs_what_may_be_trained_on(redis: Any, blobs: RedisBlobs) -> None:
    refs = await filled(redis, blobs)
    await refs.release_before(1)
    await refs.renew(5000)
    prolonged = {name.decode() for name in await redis.keys("*") if await redis.ttl(name) > 4000}
    trajectories = {keys.blob(JOB, "trajectory", 1, 0, index) for index in (0, 1)}
    assert prolonged == trajectories | {keys.blob(JOB, "embeds", 1, 0), keys.blob(JOB, SHARED, 0)}


async def test_a_lost_sample_makes_room_for_the_new_one(redis: Any, blobs: RedisBlobs) -> None:
    refs = await filled(redis, blobs)
    first = await refs.get(0, [(0, 0)])
    again = common_pb2.Sample(id=first[0].id, policy_version=7)
    await write(redis, partial(refs.put, [again]))
    assert await refs.get(0, [(0, 0)]) == first
    await write(redis, partial(refs.remove, 0, first), partial(refs.put, [again]))
    assert await refs.get(0, [(0, 1), (0, 0)]) == [*(await refs.get(0, [(0, 1)])), again]


async def test_nothing_walks_through_all_keys_of_redis(redis: Any, blobs: RedisBlobs) -> None:
    refs = await filled(redis, blobs)
    await redis.config_resetstat()
    await refs.renew(5000)
    await refs.release_before(9)
    called = await redis.info("commandstats")
    assert "cmdstat_smembers" in called
    assert not {"cmdstat_scan", "cmdstat_keys"} & called.keys()
