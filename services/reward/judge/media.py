"""Media as data URLs: pictures pass as they are, videos as evenly spaced frames."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pybase64
from PIL import Image

from flowfleet.media.files import PICTURE_TYPES, MediaError, OpenedMedia, decode_media, encode_media, open_media
from flowfleet.media.text import TEXT_TYPE, open_text

FRAME_QUALITY = 95
"""JPEG quality of a video's frames."""
MAX_SOURCE_BYTES = 2**26
MAX_FRAME_PIXELS = 2**24
"""Maximum pixels of the videos decoded at once, at one frame each; a decoder holds up to 17 frames of its own."""


@dataclass(frozen=True, eq=False, slots=True)
class Picture:
    """A picture in a request: an encoded file as it is."""

    data: bytes
    media_type: str
    digest: bytes
    """SHA-256 of `data`."""

    @classmethod
    def of(cls, data: bytes, media_type: str) -> Picture:
        return cls(data, media_type, hashlib.sha256(data).digest())

    @property
    def url(self) -> bytes:
        """ "data:image/png;base64,…", made for each call: it is a third larger than the file, and needed only while it
        is sent."""
        return b"data:" + self.media_type.encode() + b";base64," + pybase64.b64encode(self.data)


Part = str | Picture
"""Part of a question."""


def digest_of(parts: Sequence[Part]) -> bytes:
    """Digest of several pictures or texts in order."""
    digests = (hashlib.sha256(part.encode()).digest() if isinstance(part, str) else part.digest for part in parts)
    return hashlib.sha256(b"".join(digests)).digest()


class Room:
    """So much and no more at a time, in order. For one event loop."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()

    @asynccontextmanager
    async def take(self, amount: int) -> AsyncIterator[None]:
        """Waits for it; what is larger than all of the room gets all of it."""
        amount = min(amount, self._size)
        async with self._turn:  # else what is small would pass what is large for ever
            while self._free < amount:
                self._left.clear()
                await self._left.wait()
            self._free -= amount
        try:
            yield
        finally:
            self._free += amount
            self._left.set()


async def parts_of(data: bytes, media_type: str, num_frames: int, room: Room) -> list[Part]:
    """The text, or the same pictures as `pictures_of`. Raises MediaError."""
    if media_type == TEXT_TYPE:
        return [open_text(data).text]
    return [*await pictures_of(data, media_type, num_frames, room)]


async def pictures_of(data: bytes, media_type: str, num_frames: int, room: Room) -> list[Picture]:
    """The picture itself, or at most `num_frames` frames of a video, decoded in a thread where there is `room` for a
    frame's pixels. Raises MediaError."""
    if media_type in PICTURE_TYPES:
        return [Picture.of(data, media_type)]
    opened = await asyncio.to_thread(open_media, data, media_type)
    async with room.take(opened.width * opened.height):
        return await _to_its_end(asyncio.create_task(asyncio.to_thread(_frames, opened, num_frames)))


async def _to_its_end(work: asyncio.Task[list[Picture]]) -> list[Picture]:
    """A thread cannot be cancelled: who is waits for it, so that its room is not given away too soon."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def _frames(opened: OpenedMedia, num_frames: int) -> list[Picture]:
    """Encodes evenly spaced frames as JPEGs, with one decoded frame in memory at a time."""
    places = np.linspace(0, opened.num_frames - 1, min(num_frames, opened.num_frames)).round().astype(int).tolist()
    return [
        Picture.of(_jpeg(Image.fromarray(frame)), "image/jpeg")
        for place, frame in enumerate(opened.frames())
        if place in places
    ]


def _jpeg(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=FRAME_QUALITY, subsampling=0)
    return out.getvalue()


def source_picture(metadata: Mapping[str, str], root: Path | None) -> Picture:
    """The picture that was edited, from the metadata field `source`: a data URL, or the path of a file below `root`.
    Reads the file, so call it in a thread. ValueError says what to change."""
    given = metadata.get("source", "")
    if not given:
        raise ValueError("the rubric shows {source}: the prompt's line needs a metadata field source with that picture")
    if given.startswith("data:image/"):
        return _of_data_url(given)
    if root is None:
        raise ValueError("metadata source names a file: settings.media_root must say below which folder such files are")
    path = (root / given).resolve()
    media_type = next((name for name, kind in PICTURE_TYPES.items() if _suffix_fits(path.suffix, kind)), None)
    if media_type is None or not path.is_relative_to(root.resolve()):
        raise ValueError(f"metadata source {given!r} must be a .png, .jpg or .webp file below settings.media_root")
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            raise ValueError(f"metadata source {given!r} has more than {MAX_SOURCE_BYTES} bytes")
        return _of_source(path.read_bytes(), media_type)
    except OSError as error:
        raise ValueError(f"metadata source {given!r} below settings.media_root: {error.strerror}") from error


def _of_data_url(url: str) -> Picture:
    head, _, data = url.partition(";base64,")
    media_type = head.removeprefix("data:")
    try:
        if media_type not in PICTURE_TYPES:
            raise MediaError("media_type", f"its type must be one of {', '.join(PICTURE_TYPES)}")
        return _of_source(pybase64.b64decode(data, validate=True), media_type)
    except ValueError as error:
        raise ValueError(f"metadata source is no data URL of a picture: {error}") from error


def _of_source(data: bytes, media_type: str) -> Picture:
    """Gray of 16 bits, by a PNG's header, is sent in 8: servers of models cut it off, to white. Raises MediaError."""
    if media_type == "image/png" and data[24:26] == b"\x10\0":
        data, media_type = encode_media(decode_media(data, media_type))
    return Picture.of(data, media_type)


def _suffix_fits(suffix: str, kind: str) -> bool:
    return suffix.lower() in ((".jpg", ".jpeg") if kind == "JPEG" else (f".{kind.lower()}",))
