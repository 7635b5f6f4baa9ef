"""The pictures, videos, sounds and texts that the suite sends: made here, the same each time."""

import functools
import io
import struct
import zlib
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from flowfleet.media.files import PICTURE_TYPES, VIDEO_TYPES, Frames, encode_media
from flowfleet.media.sound import SOUND_RATE, Sound, encode_sound
from flowfleet.media.text import TEXT_TYPE
from flowfleet.prompts.prompt import PICTURES

WORD: Final = "FLOW"
SIZE: Final = (128, 64)
NUM_FRAMES: Final = 9
_GRAIN: Final = 12
_STEP: Final = 4
"""Pixels that a video's sign moves to the right from frame to frame."""
_PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_CHUNK_BYTES: Final = 2**20

Media = tuple[bytes, str]
"""A file and its media type."""


def read(path: Path) -> Media:
    """A picture, video, sound or text of the user's. ValueError for another kind of file."""
    media_type = {**PICTURES, ".mp4": VIDEO_TYPES[0], ".wav": "audio/wav", ".txt": TEXT_TYPE}.get(path.suffix.lower())
    if media_type is None:
        raise ValueError(f"--image {path}: give a file that ends in {', '.join(PICTURES)} or .mp4, .wav, .txt")
    return path.read_bytes(), media_type


@functools.cache
def picture(index: int, media_type: str = "image/png") -> Media:
    """A sign; each index has a color, a length of the word and an amount of grain of its own."""
    buffer = io.BytesIO()
    _drawn(index).save(buffer, PICTURE_TYPES[media_type])
    return buffer.getvalue(), media_type


@functools.cache
def video(index: int) -> Media:
    """The same sign, which moves to the right."""
    return encode_media(_moving(index))


@functools.cache
def film(index: int) -> Media:
    """The same with a tone; each index has a pitch and a loudness of its own."""
    return encode_media(_moving(index), sound=_tone(index))


def wave(index: int) -> Media:
    """The tone alone."""
    return encode_sound(_tone(index))


def _moving(index: int) -> Frames:
    still = np.asarray(_drawn(index))
    return np.stack([np.roll(still, _STEP * number, axis=1) for number in range(NUM_FRAMES)])


def _tone(index: int) -> Sound:
    times = np.arange(SOUND_RATE * NUM_FRAMES // 16) / SOUND_RATE
    tone = np.sin(2 * np.pi * 220 * (index + 1) * times) / (index + 2)
    return Sound(tone[None].astype(np.float32), SOUND_RATE)


def answer(index: int) -> Media:
    """An answer that reasons first; each index comes to a letter of its own."""
    reasoning = "I look at the choices one by one. " * (index + 1)
    return f"{reasoning}\n\nThe answer is {'ABCDEFGH'[index]}".encode(), TEXT_TYPE


@functools.cache
def big_picture(side: int = 2048) -> Media:
    """Square, of large flat blocks, so that it is small as a file."""
    return encode_media(np.asarray(_drawn(0).resize((side, side), Image.Resampling.NEAREST))[None])


def huge_picture(side: int = 30_000) -> Media:
    """A PNG whose header promises more pixels than anybody should make room for: at 30,000 a side 2.5 GiB as RGB."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = _chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(bytes(3 * side + 1))), _chunk(b"IEND", b"")
    return _PNG_SIGNATURE + b"".join(chunks), "image/png"


def padded(media: Media, size_bytes: int) -> Media:
    """Adds so many bytes to a PNG, in private chunks that readers must skip. Other kinds of files stay as they are."""
    data, media_type = media
    if media_type != "image/png":
        return media
    end = data.rindex(b"IEND") - 4
    padding = _chunk(b"flFt", bytes(_CHUNK_BYTES)) * -(-size_bytes // _CHUNK_BYTES)
    return data[:end] + padding + data[end:], media_type


def garbage(media_type: str) -> Media:
    """Returns bytes that are not a picture, video or text, whatever the media type says."""
    said = b"this is neither a picture nor a video"
    return b"\xff" + said if media_type == TEXT_TYPE else said, media_type


def truncated(media: Media) -> Media:
    """Its first half."""
    return media[0][: len(media[0]) // 2], media[1]


def _drawn(index: int) -> Image.Image:
    width, height = SIZE
    color = tuple((step * (index + 1)) % 128 + 112 for step in (37, 91, 53))
    sign = Image.new("RGB", (width, height), color)
    text = WORD[: len(WORD) - index % 3]
    ImageDraw.Draw(sign).text((width / 2, height / 2), text, "black", ImageFont.load_default(height / 2), anchor="mm")
    noise = np.random.default_rng(index).integers(0, _GRAIN * (index % 4) + 1, (height, width, 3))
    return Image.fromarray((np.asarray(sign) - noise).clip(0, 255).astype(np.uint8))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
