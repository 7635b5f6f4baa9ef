from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flowfleet.media.files import encode_media
from flowfleet.media.sound import Sound, encode_sound
from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_SOUND, MODALITY_VIDEO, Modality
from flowfleet.rewards.requests import EncodedSample
from services.reward.execution.decoding import MAX_PIXELS, MAX_SIDE, Opened, decode, open_sample
from services.reward.scorer import Problem, Sample
from tests.services.reward.pictures import encoded, sign

PICTURE = encoded(sign("AB3"))


def read(
    media: bytes, media_type: str = "image/png", modalities: Sequence[Modality.ValueType] = (MODALITY_IMAGE,)
) -> Sample | Problem:
    sample = EncodedSample(media, media_type, "p", {"k": "v"})
    opened = open_sample(sample, modalities)
    return decode(opened) if isinstance(opened, Opened) else opened


def problem(media: bytes, media_type: str = "image/png") -> Problem:
    result = read(media, media_type)
    assert isinstance(result, Problem)
    return result


def bomb(width: int, height: int) -> bytes:
    """A valid black gray-scale PNG, packed about 1000 to 1."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(bytes(1 + width)) for _ in range(height)) + packer.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def test_pixels_prompt_and_metadata_arrive() -> None:
    result = read(PICTURE)
    assert isinstance(result, Sample)
    np.testing.assert_array_equal(np.asarray(result.image), np.asarray(sign("AB3")))
    assert (result.prompt, dict(result.metadata)) == ("p", {"k": "v"})


@pytest.mark.parametrize(("media_type", "kind"), [("image/png", "PNG"), ("image/jpeg", "JPEG"), ("image/webp", "WEBP")])
def test_every_listed_format_is_read(media_type: str, kind: str) -> None:
    media = encoded(sign("AB3"), kind)
    result = read(media, media_type)
    assert isinstance(result, Sample)
    np.testing.assert_array_equal(np.asarray(result.image), np.asarray(Image.open(io.BytesIO(media)).convert("RGB")))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_other_modes_become_rgb(mode: str) -> None:
    picture = Image.new("I;16", (8, 4)) if mode == "I;16" else sign("AB3").convert(mode)
    result = read(encoded(picture))
    assert isinstance(result, Sample)
    assert result.image.mode == "RGB"
    assert result.image.size == picture.size


@pytest.mark.parametrize(
    ("media", "media_type", "reason"),
    [
        (b"", "image/png", "undecodable"),
        (b"not a picture", "image/png", "undecodable"),
        (PICTURE[: len(PICTURE) // 2], "image/png", "undecodable"),
        (PICTURE, "image/jpeg", "undecodable"),
        (PICTURE, "", "media_type"),
        (PICTURE, "video/mp4", "media_type"),
        (PICTURE, "image/svg+xml", "media_type"),
    ],
)
def test_what_is_no_whole_picture_of_its_type_is_refused(media: bytes, media_type: str, reason: str) -> None:
    assert problem(media, media_type).reason == reason


def test_videos_are_read_for_scorers_that_take_them() -> None:
    frames = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1) * np.full((16, 32, 3), 50, np.uint8)
    media, media_type = encode_media(frames)
    for modalities in ((MODALITY_VIDEO,), (MODALITY_IMAGE, MODALITY_VIDEO)):
        result = read(media, media_type, modalities)
        assert isinstance(result, Sample)
        assert result.frames.shape == frames.shape
        assert np.abs(result.frames.astype(int) - frames).max() <= 3
        assert (result.prompt, dict(result.metadata)) == ("p", {"k": "v"})
        broken = read(media[: len(media) // 2], media_type, modalities)
        assert isinstance(broken, Problem)
        assert broken.reason == "undecodable"
    refused = read(PICTURE, "image/png", (MODALITY_VIDEO,))
    assert isinstance(refused, Problem)
    assert refused.message == "media_type 'image/png' is not read here: send video/mp4"


def test_a_scorer_of_sounds_hears_films_and_waves() -> None:
    sound = Sound(np.full((1, 8000), 0.25, np.float32), 16_000)
    frames = np.zeros((5, 16, 16, 3), np.uint8)
    for media, media_type in (encode_media(frames, 16.0, sound), encode_sound(sound)):
        heard = read(media, media_type, (MODALITY_SOUND,))
        assert isinstance(heard, Sample)
        assert len(heard.frames) == 0
        assert np.abs(heard.sound - 0.25).max() < 2**-14
    both = read(*encode_media(frames, 16.0, sound), (MODALITY_SOUND, MODALITY_VIDEO))
    assert isinstance(both, Sample)
    assert (len(both.frames), len(both.sound)) == (5, 8000)
    silent = read(*encode_media(frames), (MODALITY_SOUND,))
    assert isinstance(silent, Problem)
    assert silent.reason == "silent"
    assert "the film has no sound" in silent.message
    refused = read(PICTURE, "image/png", (MODALITY_SOUND,))
    assert isinstance(refused, Problem)
    assert "send video/mp4, audio/wav" in refused.message


def test_absurd_sizes_are_refused_from_the_header() -> None:
    for width, height in ((100_000, 100_000), (MAX_SIDE + 1, 1), (4097, 4096)):
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        media = PICTURE[:12] + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + PICTURE[33:]
        assert problem(media).reason == "too_large"


def test_decompression_bombs_are_refused() -> None:
    media = bomb(8192, 4096)
    assert len(media) < MAX_PIXELS / 400
    found = problem(media)
    assert found.reason == "too_large"
    assert "8192 x 4096" in found.message
    assert str(MAX_PIXELS) in found.message


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, len(PICTURE) - 1),
    st.binary(min_size=1, max_size=40),
    st.sampled_from([("image/png", PICTURE), ("image/webp", encoded(sign("AB3"), "WEBP"))]),
)
def test_broken_bytes_never_raise(at: int, patch: bytes, of: tuple[str, bytes]) -> None:
    media_type, media = of
    assert isinstance(read(media[:at] + patch + media[at + len(patch) :], media_type), Sample | Problem)
