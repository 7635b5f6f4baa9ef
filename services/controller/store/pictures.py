"""Which pictures of training samples outlive their step: the newest, the best by the total and by each reward, and
those that people vote on. The others are deleted when their step has ended; a blob's own time to live ends the rest.

`ff:<job>:pictures` is the set of samples whose pictures stay, and `ff:<job>:pictures:ended` the step up to which that
is decided. Deciding again, as after a crash, deletes the same pictures.
"""

import heapq
from collections.abc import Collection, Mapping

from flowfleet.data.blobs import BlobStore, discard
from flowfleet.redis import keys
from services.controller.store.records import SampleRecord
from services.controller.store.samples import PAGE, media_ref
from services.controller.store.store import Store

MOST_STEPS = 100
"""Steps that are decided at once after a store that failed for long."""
Place = tuple[int, int, int]
"""Step, group and index."""
TOTAL = ""
"""Ranking by the weighted sum of all rewards."""


class Pictures:
    """Pictures of one job; `number` is its `schedule.keep_pictures`."""

    def __init__(self, store: Store, blobs: BlobStore, job_id: str, number: int) -> None:
        self._store, self._blobs, self._job_id, self._number = store, blobs, job_id, number
        self._redis = store.link.redis

    async def end(self, step: int) -> None:
        """Deletes what need not stay of the steps up to this one, which have ended. Where the store of files fails,
        the next call decides on the same steps."""
        name, ended = keys.pictures(self._job_id), keys.pictures(self._job_id, "ended")
        done = await self._redis.get(ended)
        before = {_place(member) for member in await self._redis.smembers(name)}
        found = {_place_of(one): one for one in await self._store.samples.find(self._job_id, sorted(before))}
        first = step if done is None else min(int(done) + 1, step)  # none: an older release made the steps before
        for number in range(max(first, step + 1 - MOST_STEPS), step + 1):
            found |= await self._of_step(number)
        votes = await self._store.votes.places(self._job_id)
        stay = kept({place: rankings(one) for place, one in found.items()}, self._number)
        stay |= {place for place in found if place[:2] in votes}
        if not await self._delete([one for place, one in found.items() if place not in stay]):
            return
        async with self._redis.pipeline(transaction=True) as pipe:
            if gone := before - stay:
                pipe.srem(name, *map(_member, gone))
            if new := stay - before:
                pipe.sadd(name, *map(_member, new))
            pipe.set(ended, step)
            await pipe.execute()

    async def _of_step(self, step: int) -> dict[Place, SampleRecord]:
        found: dict[Place, SampleRecord] = {}
        cursor = None
        while True:
            page, cursor = await self._store.samples.page(
                self._job_id, step=step, order="oldest", cursor=cursor, limit=PAGE
            )
            found |= {_place_of(one): one for one in page}
            if cursor is None:
                return found

    async def _delete(self, samples: Collection[SampleRecord]) -> bool:
        """Media that the job's data brought are shared between steps, and stay for their own time to live."""
        own = self._blobs.uri(keys.blob(self._job_id, "media"))
        refs = [media_ref(one) for one in samples if one.media_uri.startswith(own)]
        for start in range(0, len(refs), PAGE):
            if not await discard(self._blobs, refs[start : start + PAGE]):
                return False
        return True


def rankings(sample: SampleRecord) -> dict[str, float]:
    """Ranking → value of a sample: the total and each reward's own score."""
    values = {TOTAL: sample.reward, **{name: sample.scores.get(name) for name in sample.versions}}
    return {name: value for name, value in values.items() if value is not None}


def kept(samples: Mapping[Place, Mapping[str, float]], number: int) -> set[Place]:
    """The newest `number` samples, and the best `number` of each ranking; of equals the newer."""
    found = set(heapq.nlargest(number, samples))
    for name in {name for values in samples.values() for name in values}:
        ranked = ((values[name], place) for place, values in samples.items() if name in values)
        found |= {place for _, place in heapq.nlargest(number, ranked)}
    return found


def _place_of(sample: SampleRecord) -> Place:
    return sample.step, sample.group, sample.index


def _member(place: Place) -> str:
    return "{}/{}/{}".format(*place)


def _place(member: bytes) -> Place:
    step, group, index = map(int, member.split(b"/"))
    return step, group, index
