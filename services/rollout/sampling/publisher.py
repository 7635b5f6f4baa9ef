"""Publisher: stores a generated batch as blobs, writes it to the job's stream and makes the `Sample` messages.

A blob's key carries the hash of its content, so a sample made twice never changes what an earlier reference points to.
A training sample is appended to the job's trajectory stream once all its blobs are stored, and its caller gets its id;
previews and validation samples have nothing to train on and go back to the caller alone.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

import redis.asyncio

from flowfleet.data.blobs import WORKING_TTL_S, BlobStore
from flowfleet.data.sequences import PromptBlob
from flowfleet.data.streams import TrajectoryStream
from flowfleet.data.trajectories import EmbedsBlob
from flowfleet.media.files import encode_media
from flowfleet.media.text import TEXT_TYPE
from flowfleet.models.embeds import PromptEmbeds
from flowfleet.models.sequences.prompts import EncodedPrompt
from flowfleet.process import traces
from flowfleet.proto.common_pb2 import PURPOSE_TRAIN, BlobRef, Media, Sample, SampleId
from flowfleet.proto.rollout_pb2 import GenerateRequest, Noise
from flowfleet.redis import keys
from flowfleet.redis.trouble import patiently
from services.rollout.engines.base import GeneratedBatch, GeneratedSample

P = ParamSpec("P")
T = TypeVar("T")

MEDIA_TTL_S = 24 * 3600
"""Pictures and videos are for rewards and people. The controller deletes most of a step's when it has ended
(services/controller/store/pictures.py)."""
_PARALLEL_WRITES = 8


@dataclass(frozen=True)
class _Shared:
    """References that the samples of one batch share, or that came with the request."""

    embeds: dict[int, BlobRef]
    """Embeddings by group; empty of samples that are not trained on."""
    negative: dict[int, BlobRef]
    """Negative embeddings by group; empty without guidance."""
    media: dict[tuple[int, int], Media]
    """Media of the request, by group and index; empty if its samples were drawn."""


class Publisher:
    """Encodes in `pool`, off the event loop and off the engine's thread."""

    def __init__(
        self, client: redis.asyncio.Redis, blobs: BlobStore, replica_id: str, pool: ThreadPoolExecutor
    ) -> None:
        self._redis = client
        self._blobs = blobs
        self._replica_id = replica_id
        self._pool = pool
        self._writes = asyncio.Semaphore(_PARALLEL_WRITES)

    async def publish(self, request: GenerateRequest, batch: GeneratedBatch) -> list[Sample]:
        """Stores a batch and returns its samples in order. The request tells job, step, purpose and policy version.
        Embeddings are for trainers alone: only training samples have them."""
        trains = request.purpose == PURPOSE_TRAIN
        shared = _Shared(
            {
                group: await self._put_embeds(request, "embeds", (request.step, group), prompt)
                for group, prompt in (batch.embeds if trains else {}).items()
            },
            await self._put_negatives(request, batch) if trains else {},
            {
                (group.group, index): media
                for group in request.groups
                for index, media in zip(group.indices, group.media, strict=False)
            },
        )
        return await asyncio.gather(*(self._publish(request, sample, shared) for sample in batch.samples))

    async def _publish(self, request: GenerateRequest, generated: GeneratedSample, shared: _Shared) -> Sample:
        async with self._writes:
            sample = self._sample(request, generated, shared)
            media = shared.media.get((generated.group, generated.index)) or await self._put_media(request, generated)
            sample.media.CopyFrom(media.blob)
            sample.media_type = media.media_type
            if generated.record is not None:
                record = await self._in_pool(generated.record.to_bytes)
                sample.trajectory.CopyFrom(await self._put_own(request, "trajectory", generated, record))
            if request.purpose == PURPOSE_TRAIN:
                stream = TrajectoryStream(self._redis, request.job_id)
                await patiently(lambda: stream.publish(sample))
            return sample

    async def _put_negatives(self, request: GenerateRequest, batch: GeneratedBatch) -> dict[int, BlobRef]:
        """Stores the negative prompts' embeddings. Groups share the blob of the job's negative prompt. A group with
        images or a negative prompt of its own has its own blob, named by its step."""
        separate = {group.group for group in request.groups if group.images or group.HasField("negative_prompt")}
        stored: dict[int, BlobRef] = {}
        refs: dict[int, BlobRef] = {}
        for group, prompt in batch.negative.items():
            if group in separate:
                refs[group] = await self._put_embeds(request, "negative", (request.step, group), prompt)
                continue
            if id(prompt) not in stored:
                stored[id(prompt)] = await self._put_embeds(request, "negative", (), prompt)
            refs[group] = stored[id(prompt)]
        return refs

    async def _put_embeds(
        self, request: GenerateRequest, kind: str, key_parts: Sequence[int], prompt: PromptEmbeds | EncodedPrompt
    ) -> BlobRef:
        """Stores one row of embeddings."""
        blob = PromptBlob.of(prompt) if isinstance(prompt, EncodedPrompt) else EmbedsBlob.of_row(prompt)
        return await self._put(request.job_id, kind, key_parts, await self._in_pool(blob.to_bytes))

    async def _put_media(self, request: GenerateRequest, generated: GeneratedSample) -> Media:
        if generated.text is not None:
            data, media_type = generated.text.encode("utf-8", "replace"), TEXT_TYPE
        else:
            data, media_type = await self._in_pool(encode_media, generated.frames, generated.fps, generated.sound)
        return Media(blob=await self._put_own(request, "media", generated, data), media_type=media_type)

    async def _put_own(self, request: GenerateRequest, kind: str, sample: GeneratedSample, data: bytes) -> BlobRef:
        return await self._put(request.job_id, kind, (request.step, sample.group, sample.index), data)

    async def _put(self, job_id: str, kind: str, place: Sequence[int], data: bytes) -> BlobRef:
        key, ttl_s = keys.blob(job_id, kind, *place), MEDIA_TTL_S if kind == "media" else WORKING_TTL_S
        return await patiently(lambda: self._blobs.put(key, data, ttl_s=ttl_s, by_content=True))

    async def _in_pool(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args, **kwargs))

    def _sample(self, request: GenerateRequest, generated: GeneratedSample, shared: _Shared) -> Sample:
        return Sample(
            id=SampleId(job_id=request.job_id, step=request.step, group=generated.group, index=generated.index),
            purpose=request.purpose,
            seed=generated.seed,
            policy_version=request.policy_version,
            weights_digest=request.weights_digest,
            prompt_embeds=shared.embeds.get(generated.group),
            negative_embeds=shared.negative.get(generated.group),
            sde_steps=() if shared.media else _recorded(request.noise),
            height=request.sampling.height,
            width=request.sampling.width,
            num_frames=len(generated.frames),
            replica_id=self._replica_id,
            reference_kl=generated.reference_kl,
            prompt_tokens=generated.prompt_tokens,
            num_tokens=generated.num_tokens,
            stop_reason=generated.stop_reason,
            traceparent=traces.traceparent(),
        )


def _recorded(noise: Noise) -> Sequence[int]:
    """The noisy steps that trajectories hold."""
    return noise.recorded_steps or (noise.sde_steps if noise.eta > 0 else ())
