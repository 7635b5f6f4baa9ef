"""Media as data URLs: pictures pass as they are, videos as evenly spaced frames."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pybase64
from PIL import Image

from flowfleet.media import PICTURE_TYPES, MediaError, decode_media

FRAME_QUALITY = 95
"""Of a video's frames as JPEG."""
MAX_SOURCE_BYTES = 2**26


@dataclass(frozen=True, eq=False, slots=True)
class Picture:
    """A picture in a request."""

    url: bytes
    """"data:image/png;base64,…"."""
    digest: bytes
    """SHA-256 of the encoded file."""

    @classmethod
    def of(cls, data: bytes, media_type: str) -> Picture:
        """From an encoded file, as it is."""
        url = b"data:" + media_type.encode() + b";base64," + pybase64.b64encode(data)
        return cls(url, hashlib.sha256(data).digest())


def digest_of(pictures: Sequence[Picture]) -> bytes:
    """Of several pictures in order."""
    return hashlib.sha256(b"".join(picture.digest for picture in pictures)).digest()


async def pictures_of(data: bytes, media_type: str, num_frames: int) -> list[Picture]:
    """The picture itself, or at most `num_frames` frames of a video, decoded in a thread. Raises MediaError."""
    if media_type in PICTURE_TYPES:
        return [Picture.of(data, media_type)]
    return await asyncio.to_thread(_frames, data, media_type, num_frames)


def _frames(data: bytes, media_type: str, num_frames: int) -> list[Picture]:
    frames = decode_media(data, media_type)
    places = np.linspace(0, len(frames) - 1, min(num_frames, len(frames))).round().astype(int)
    return [Picture.of(_jpeg(Image.fromarray(frames[place])), "image/jpeg") for place in places]


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
        return Picture.of(path.read_bytes(), media_type)
    except OSError as error:
        raise ValueError(f"metadata source {given!r} below settings.media_root: {error.strerror}") from error


def _of_data_url(url: str) -> Picture:
    head, _, data = url.partition(";base64,")
    media_type = head.removeprefix("data:")
    try:
        if media_type not in PICTURE_TYPES:
            raise MediaError("media_type", f"its type must be one of {', '.join(PICTURE_TYPES)}")
        return Picture.of(pybase64.b64decode(data, validate=True), media_type)
    except ValueError as error:
        raise ValueError(f"metadata source is no data URL of a picture: {error}") from error


def _suffix_fits(suffix: str, kind: str) -> bool:
    return suffix.lower() in ((".jpg", ".jpeg") if kind == "JPEG" else (f".{kind.lower()}",))
