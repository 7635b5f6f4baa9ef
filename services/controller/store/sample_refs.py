"""References of one job's training samples, and its trainer's requests, as Redis holds them until a checkpoint covers
their step.

`ff:<job>:refs:<step>` has a field a sample, `ff:<job>:train:<step>` the request, and the set `ff:<job>:held` the steps
that have either. A step enters the set in the transaction that stores its first key, and leaves it in the one that
deletes its keys.
"""

import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from flowfleet.data.blobs import BlobStore, discard
from flowfleet.proto import common_pb2, trainer_pb2
from flowfleet.redis import keys

ALL_STEPS = sys.maxsize
"""A version above that of any step: releasing before it releases all."""
SLICE = 256
"""Samples that are handled in one go: the event loop serves others in between."""
TRAINED = ("trajectory", "prompt_embeds", "negative_embeds")
"""Blobs that a training step reads."""


class SampleRefs:
    """`redis` decodes no responses. Methods with a `pipe` add to that transaction, as a `ledger.Also` does."""

    def __init__(self, redis: Any, blobs: BlobStore, job_id: str) -> None:
        self._redis, self._blobs, self._job_id = redis, blobs, job_id

    async def put(self, samples: Iterable[common_pb2.Sample], pipe: Any) -> None:
        """Stores references; one that is there stays."""
        steps = set[int]()
        for sample in samples:
            steps.add(sample.id.step)
            pipe.hsetnx(self._key(sample.id.step), _field(sample.id), sample.SerializeToString())
        self._hold(steps, pipe)

    async def remove(self, step: int, samples: Iterable[common_pb2.Sample], pipe: Any) -> None:
        """Takes references away, so that those of the new samples count."""
        pipe.hdel(self._key(step), *(_field(sample.id) for sample in samples))

    async def get(self, step: int, places: Sequence[tuple[int, int]]) -> list[common_pb2.Sample]:
        """References of a step's samples, (group, index) each, in order."""
        names = [f"{group}/{index}" for group, index in places]
        values = await self._redis.hmget(self._key(step), names) if names else []
        return [common_pb2.Sample.FromString(value) for value in values]

    async def find(self, step: int, group: int, index: int) -> common_pb2.Sample | None:
        """Returns one sample's reference, if the step is held."""
        value = await self._redis.hget(self._key(step), f"{group}/{index}")
        return None if value is None else common_pb2.Sample.FromString(value)

    # -- requests of training steps ------------------------------------------------------------------------------

    async def put_request(self, request: trainer_pb2.TrainStepRequest, pipe: Any) -> None:
        """Stores it without the samples' trace contexts: these differ between runs, and versions' lineage is of all the
        rest."""
        for item in request.samples:
            item.sample.ClearField("traceparent")
        pipe.set(self._request_key(request.step), request.SerializeToString())
        self._hold({request.step}, pipe)

    async def has_request(self, step: int) -> bool:
        return bool(await self._redis.exists(self._request_key(step)))

    async def request(self, step: int) -> trainer_pb2.TrainStepRequest | None:
        stored = await self._redis.get(self._request_key(step))
        return None if stored is None else trainer_pb2.TrainStepRequest.FromString(stored)

    # -- the steps that are held ---------------------------------------------------------------------------------

    async def release_before(self, version: int) -> None:
        """Frees what only the steps below a checkpointed version needed; pictures stay for their TTL. Where the store
        of files fails, steps wait for the next checkpoint."""
        for step in await self.held():
            if step < version:
                async for refs in self._refs(step):
                    if not await discard(self._blobs, [ref for ref in refs if not self._is_of_job(ref, step)]):
                        return
                async with self._redis.pipeline(transaction=True) as pipe:
                    pipe.unlink(self._key(step), self._request_key(step))
                    pipe.srem(keys.held_steps(self._job_id), step)
                    await pipe.execute()

    async def renew(self, ttl_s: int) -> None:
        """Prolongs the blobs that may still be trained on."""
        for step in await self.held():
            async for refs in self._refs(step):
                await self._blobs.renew(refs, ttl_s)

    async def held(self) -> list[int]:
        """Steps, ascending."""
        return sorted(map(int, await self._redis.smembers(keys.held_steps(self._job_id))))

    def _hold(self, steps: Iterable[int], pipe: Any) -> None:
        if members := sorted(steps):
            pipe.sadd(keys.held_steps(self._job_id), *members)

    def _key(self, step: int) -> str:
        return keys.sample_refs(self._job_id, step)

    def _request_key(self, step: int) -> str:
        return keys.train_request(self._job_id, step)

    def _is_of_job(self, ref: common_pb2.BlobRef, step: int) -> bool:
        """True if it is of the job's own negative prompt, which outlives the step. Negative embeds of a group's own
        prompt or images have the step in their name."""
        negative, of_step = (self._blobs.uri(keys.blob(self._job_id, "negative", *place)) for place in ((), (step,)))
        return _is_below(ref.uri, negative) and not _is_below(ref.uri, of_step)

    async def _refs(self, step: int) -> AsyncIterator[list[common_pb2.BlobRef]]:
        """References of the blobs of a step's samples, in slices; several samples may share one."""
        cursor = -1
        while cursor:
            cursor, values = await self._redis.hscan(self._key(step), max(cursor, 0), count=SLICE)
            samples = [common_pb2.Sample.FromString(value) for value in values.values()]
            refs = [getattr(sample, name) for sample in samples for name in TRAINED]
            yield list({ref.uri: ref for ref in refs if ref.uri}.values())


def _field(place: common_pb2.SampleId) -> str:
    return f"{place.group}/{place.index}"


def _is_below(uri: str, place: str) -> bool:
    return uri.startswith((f"{place}:", f"{place}/"))
