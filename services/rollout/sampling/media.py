"""Media of a request: fetched, checked, decoded, and for flows brought to the size of the samples.

Condition images keep their size, because the model family knows which it needs. Finished media become frames of exactly
the request's size: cropped around the center to its aspect ratio, then resized; of a video `num_frames` frames are
taken, evenly spaced from the first to the last.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

import numpy as np
from PIL import Image, ImageOps

from flowfleet.data.blobs import BlobStore
from flowfleet.errors import DataLoss
from flowfleet.media.files import Frames, MediaLimits, decode_media, open_media
from flowfleet.media.sound import SOUND_TYPES, decode_sound
from flowfleet.models.sequences.prompts import PromptMedia
from flowfleet.models.settings import Size
from flowfleet.proto import common_pb2, rollout_pb2
from services.rollout.engines.base import GenerationRequest, PromptGroup

LIMITS: Final = MediaLimits()
_PARALLEL_READS: Final = 8

T = TypeVar("T")


class MediaReader:
    """Decodes in `pool`, off the event loop."""

    def __init__(self, blobs: BlobStore, pool: ThreadPoolExecutor) -> None:
        self._blobs = blobs
        self._pool = pool
        self._reads = asyncio.Semaphore(_PARALLEL_READS)

    async def read(self, wire: rollout_pb2.GenerateRequest, request: GenerationRequest) -> GenerationRequest:
        """`request`, which came of `wire`, with what the latter only refers to.

        Raises DataLoss for what is no picture or video of the type stated, too large or too short: the request is right
        and others with the same settings will do. NotFound for a blob that is gone.
        """
        messages = {message.group: message for message in wire.groups}
        if request.sequence is not None:
            asked = await asyncio.gather(*(self._question(messages[group.group], group) for group in request.groups))
            return replace(request, groups=tuple(asked))
        groups = await asyncio.gather(
            *(self._group(messages[group.group], group, request.sampling.size) for group in request.groups)
        )
        return replace(request, groups=tuple(groups))

    async def _group(self, message: rollout_pb2.PromptGroup, group: PromptGroup, size: Size) -> PromptGroup:
        images = await asyncio.gather(*(self._read(media, group.group, _picture) for media in message.images))
        shape = partial(fit, size=size)
        media = await asyncio.gather(*(self._read(media, group.group, shape) for media in message.media))
        by_index = dict(zip(message.indices, media, strict=False))
        return replace(group, images=tuple(images), media=tuple(by_index[index] for index in group.indices if media))

    async def _question(self, message: rollout_pb2.PromptGroup, group: PromptGroup) -> PromptGroup:
        inputs = await asyncio.gather(*(self._fetch(media, group.group, _part) for media in message.images))
        return replace(group, inputs=tuple(inputs))

    async def _read(self, media: common_pb2.Media, group: int, use: Callable[[Frames], T]) -> T:
        """Returns the result of `use` on all the frames of a file."""
        return await self._fetch(media, group, lambda data, kind: use(decode_media(data, kind, LIMITS)))

    async def _fetch(self, media: common_pb2.Media, group: int, decode: Callable[[bytes, str], T]) -> T:
        async with self._reads:
            try:
                if media.blob.size_bytes > LIMITS.max_bytes:
                    raise ValueError(f"{media.blob.size_bytes} bytes are more than {LIMITS.max_bytes}")
                data = await self._blobs.get(media.blob)
                work = partial(decode, data, media.media_type)
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
            except ValueError as error:
                raise DataLoss(f"group {group}: {media.blob.uri}: {error}") from None


def _part(data: bytes, media_type: str) -> PromptMedia:
    """A picture, sound or film of a question."""
    if media_type in SOUND_TYPES:
        return PromptMedia("sound", decode_sound(data, media_type))
    opened = open_media(data, media_type, LIMITS)
    frames = opened.decode()
    if opened.picture is not None:
        return PromptMedia("picture", frames[0])
    return PromptMedia("film", frames, opened.rate)


def _picture(frames: Frames) -> Image.Image:
    if len(frames) != 1:
        raise ValueError(f"it is a video of {len(frames)} frames: condition images must be pictures")
    return Image.fromarray(frames[0])


def fit(frames: Frames, size: Size) -> Frames:
    """(num_frames, height, width, 3) of `size` from any frames; see the module. Raises ValueError for too few."""
    if len(frames) < size.num_frames:
        raise ValueError(f"its {len(frames)} frames are fewer than sampling.num_frames = {size.num_frames}")
    indices = np.linspace(0, len(frames) - 1, size.num_frames).round().astype(int)
    return np.stack([_resized(frames[index], size) for index in indices])


def _resized(frame: Frames, size: Size) -> Frames:
    """(H, W, 3) to (height, width, 3)."""
    if frame.shape[:2] == (size.height, size.width):
        return frame
    return np.asarray(ImageOps.fit(Image.fromarray(frame), (size.width, size.height), Image.Resampling.LANCZOS))
