"""Which training pictures outlive their step, against a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import pytest
from redis.exceptions import RedisError

from flowfleet.api.votes import Asked, VoteSample
from flowfleet.data.blobs import RedisBlobs
from flowfleet.errors import NotFound
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.store.pictures import MOST_STEPS, Pictures, Place, kept
from services.controller.store.records import SampleRecord, new_job_id
from services.controller.store.samples import media_ref
from services.controller.store.store import Store

KEPT = 3
GROUPS, GROUP_SIZE = 2, 4


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    client = connect(redis_url)
    yield Store(client)
    await client.aclose()


class Job:
    def __init__(self, store: Store) -> None:
        self.id, self.store, self.blobs = new_job_id(), store, RedisBlobs(store.link.redis)
        self.samples: dict[Place, SampleRecord] = {}

    def pictures(self, number: int = KEPT) -> Pictures:
        return Pictures(self.store, self.blobs, self.id, number)

    async def make(self, step: int, kind: str = "media", purpose: str = "train") -> None:
        """`ocr` rises with the index, `taste` falls; the total is of `ocr` alone."""
        for group in range(GROUPS):
            for index in range(GROUP_SIZE):
                key = keys.blob(self.id, kind, step, group, index)
                ref = await self.blobs.put(key, f"{step}/{group}/{index}".encode(), ttl_s=100, by_content=True)
                scores = {"ocr": float(index), "ocr.part": -float(index), "taste": -float(100 * step + index)}
                record = SampleRecord.model_validate(
                    {"step": step, "group": group, "index": index, "prompt": "", "purpose": purpose}
                    | {"reward": index, "scores": scores, "versions": {"ocr": "1", "taste": "1"}}
                    | {"media_uri": ref.uri, "media_size_bytes": ref.size_bytes, "media_sha256": ref.sha256}
                )
                await self.store.samples.put(self.id, record)
                self.samples[step, group, index] = record

    async def left(self) -> set[Place]:
        found = set()
        for place, record in self.samples.items():
            try:
                await self.blobs.get(media_ref(record))
                found.add(place)
            except NotFound:
                pass
        return found

    def expected(self, steps: int, number: int = KEPT) -> set[Place]:
        """Sorts everything at once."""
        places = [place for place in self.samples if place[0] < steps]
        newest = sorted(places)[-number:]
        ocr = sorted(places, key=lambda place: (place[2], place))[-number:]
        taste = sorted(places, key=lambda place: (-100 * place[0] - place[2], place))[-number:]
        return {*newest, *ocr, *taste} if number else set()


@pytest.mark.parametrize("number", [0, 1, KEPT, 100])
async def test_the_newest_and_the_best_of_each_ranking_outlive_their_step(store: Store, number: int) -> None:
    job = Job(store)
    for step in range(4):
        await job.make(step)
        await job.pictures(number).end(step)  # nothing is remembered outside Redis
        assert await job.left() == job.expected(step + 1, number)


async def test_a_step_that_is_open_or_that_a_shadow_still_reads_keeps_its_pictures(store: Store) -> None:
    job = Job(store)
    for step in range(3):
        await job.make(step)
        await job.pictures().end(0)
    assert await job.left() == job.expected(1) | {place for place in job.samples if place[0] > 0}
    await job.pictures().end(2)  # the two that waited go together
    assert await job.left() == job.expected(3)


async def test_a_step_that_is_made_again_is_looked_at_again(store: Store) -> None:
    job = Job(store)
    for step in (0, 1, 2, 1):  # its checkpoints were lost
        await job.make(step)
        await job.pictures(1).end(step)
    assert await job.left() == job.expected(3, 1)


async def test_pictures_of_validations_votes_and_data_stay(store: Store) -> None:
    job, held_out, given = Job(store), Job(store), Job(store)
    held_out.id = given.id = job.id
    await held_out.make(0, purpose="validate")
    await given.make(0, kind="given")
    await given.pictures(0).end(0)
    assert await given.left() == {*given.samples}
    await job.make(1)
    asked = Asked(prompt="", wanted=1, samples=[VoteSample(index=i, media_type="image/png") for i in (0, 1)])
    await store.votes.ask(job.id, 1, 1, asked)
    await job.pictures(0).end(1)
    assert await job.left() == {place for place in job.samples if place[1] == 1}
    assert await held_out.left() == {*held_out.samples}


async def test_a_job_of_before_the_mark_is_looked_at_from_this_step_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, looked = Job(store), []
    page = store.samples.page

    async def noted(*args: Any, **options: Any) -> Any:
        looked.append(options["step"])
        return await page(*args, **options)

    monkeypatch.setattr(store.samples, "page", noted)
    await job.make(20_000)
    await job.pictures().end(20_000)
    assert looked == [20_000]
    assert await job.left() == job.expected(20_001)
    await store.link.redis.set(keys.pictures(job.id, "ended"), 5)  # the store has failed since
    looked.clear()
    await job.pictures().end(20_000)
    assert looked == list(range(20_001 - MOST_STEPS, 20_001))


@pytest.mark.parametrize("error", [PermissionError("read-only"), OSError("stale"), RuntimeError("NoCredentials")])
async def test_a_store_that_fails_ends_no_step_and_is_asked_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(store)
    await job.make(0)
    await job.pictures().end(0)
    await job.make(1)
    with monkeypatch.context() as broken:
        broken.setattr(job.blobs, "delete", AsyncMock(side_effect=error))
        await job.pictures().end(1)
    assert str(error) in caplog.text
    assert await store.link.redis.get(keys.pictures(job.id, "ended")) == b"0"
    await job.make(2)
    await job.pictures().end(2)
    assert await job.left() == job.expected(3)


async def test_redis_that_fails_is_its_drivers_matter(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(store)
    await job.make(0)
    monkeypatch.setattr(job.blobs, "delete", AsyncMock(side_effect=RedisError("gone")))
    with pytest.raises(RedisError):
        await job.pictures().end(0)


def test_of_equals_the_newer_stays() -> None:
    assert kept({(step, 0, 0): {"": 1.0} for step in range(5)}, 2) == {(3, 0, 0), (4, 0, 0)}
