"""Which training pictures outlive their step, against a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flowfleet.api.votes import Asked, VoteSample
from flowfleet.data.blobs import RedisBlobs
from flowfleet.errors import NotFound
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.store.pictures import Pictures, Place, kept
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


def test_of_equals_the_newer_stays() -> None:
    assert kept({(step, 0, 0): {"": 1.0} for step in range(5)}, 2) == {(3, 0, 0), (4, 0, 0)}
