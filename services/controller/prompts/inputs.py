"""Pictures and videos that a job's data brings, on their way to the rollouts: condition images of prompts, and the
finished media of preferences.

A file is read when a request needs it and goes as a blob under the hash of its content, which lives for a day after it
was last asked for. Condition images are stored once a job, and go with it. A preference's media are what people see as
its samples, and stay for their day as other samples' pictures do.
"""

import asyncio
from collections.abc import Sequence

from flowfleet.data.blobs import PICTURE_TTL_S, BlobStore
from flowfleet.errors import DataLoss, Unavailable
from flowfleet.limits import MAX_MEDIA_BYTES
from flowfleet.prompts.prompt import Prompt, media_type
from flowfleet.proto import common_pb2, rollout_pb2
from flowfleet.redis import keys
from services.controller.concurrency import gather_or_cancel
from services.controller.prompts.sources import Sources


class Inputs:
    """Inputs of one job."""

    def __init__(self, job_id: str, blobs: BlobStore, sources: Sources) -> None:
        self._job_id = job_id
        self._blobs = blobs
        self._sources = sources
        self._conditions: dict[str, common_pb2.Media] = {}

    async def attach(self, request: rollout_pb2.GenerateRequest, prompts: Sequence[Prompt]) -> None:
        """Adds to each group of a request what its prompt, one a group in their order, brings.

        Raises DataLoss for a file that is not there any more or too large, Unavailable for one that cannot be read now,
        NotAllowed where the settings of now do not let the job read it.
        """
        await gather_or_cancel(
            self._attach(group, prompt) for group, prompt in zip(request.groups, prompts, strict=True)
        )

    async def forget(self) -> None:
        """Frees all condition images."""
        await self._blobs.delete_prefix(keys.blob(self._job_id, "condition"))

    async def _attach(self, group: rollout_pb2.PromptGroup, prompt: Prompt) -> None:
        for url in prompt.images:
            group.images.append(await self._condition(url))
        if prompt.media:
            for index in group.indices:
                group.media.append(await self._store("given", prompt.media[index]))

    async def _condition(self, url: str) -> common_pb2.Media:
        """Reuses the stored input if it still exists, and renews its time to live."""
        known = self._conditions.get(url)
        if known is None or await self._blobs.renew([known.blob], PICTURE_TTL_S):
            known = self._conditions[url] = await self._store("condition", url)
        return known

    async def _store(self, kind: str, url: str) -> common_pb2.Media:
        data = await asyncio.to_thread(_read, self._sources, url)
        blob = await self._blobs.put(keys.blob(self._job_id, kind), data, ttl_s=PICTURE_TTL_S, by_content=True)
        return common_pb2.Media(blob=blob, media_type=media_type(url))


def _read(sources: Sources, url: str) -> bytes:
    try:
        data = sources.read(url, MAX_MEDIA_BYTES + 1)
    except FileNotFoundError:
        raise DataLoss(f"the data set names {url}, which does not exist") from None
    except OSError as error:
        raise Unavailable(f"the data set names {url}, which could not be read: {error}") from None
    if len(data) > MAX_MEDIA_BYTES:
        raise DataLoss(f"the data set names {url}, which is larger than {MAX_MEDIA_BYTES} bytes")
    return data
