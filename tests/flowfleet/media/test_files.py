from __future__ import annotations

import io
import re
from contextlib import suppress
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from flowfleet.media.files import (
    PICTURE_TYPES,
    Frames,
    MediaError,
    MediaLimits,
    decode_media,
    encode_media,
    open_media,
)


def smooth_video(num_frames: int = 9, height: int = 48, width: int = 80) -> Frames:
    """Waves that wander, without the sharp color edges that halved chroma cannot hold."""
    t, y, x = np.mgrid[:num_frames, :height, :width].astype(float)
    waves = [np.sin(x / 9 + t / 3), np.cos(y / 7 - t / 4), np.sin((x + y) / 15 + t / 5)]
    return np.stack([127.5 + 100 * wave for wave in waves], -1).astype(np.uint8)


VIDEO = smooth_video()
MP4, _ = encode_media(VIDEO)


def mp4(frames: Frames, codec: str = "libx264", **options: str) -> bytes:
    """A file as another program would write it: plain settings, no color tags."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4", options=options) as container:
        stream: Any = container.add_stream(codec, rate=25)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def refused(data: bytes, media_type: str = "video/mp4", limits: MediaLimits | None = None) -> MediaError:
    with pytest.raises(MediaError) as caught:
        decode_media(data, media_type, limits)
    return caught.value


def test_one_frame_is_a_png_without_loss() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (1, 7, 5, 3), np.uint8)
    data, media_type = encode_media(frame)
    assert media_type == "image/png"
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), frame[0])
    np.testing.assert_array_equal(decode_media(data, media_type), frame)


def test_a_video_comes_back_almost_as_it_was() -> None:
    data, media_type = encode_media(VIDEO)
    assert media_type == "video/mp4"
    frames = decode_media(data, media_type)
    assert frames.dtype == np.uint8
    assert frames.shape == VIDEO.shape
    error = frames.astype(int) - VIDEO
    assert np.abs(error).mean() < np.abs(halved_chroma(VIDEO) - VIDEO).mean()
    assert np.abs(error.mean((0, 1, 2))).max() < 0.5


def halved_chroma(frames: Frames) -> NDArray[np.float64]:
    """In float64, without compression: what is left when four pixels share the mean of their BT.709 chroma."""
    red, green, blue = 0.2126, 0.7152, 0.0722
    luma = np.array([red, green, blue])
    to_yuv = np.stack(
        [luma, (np.array([0, 0, 1]) - luma) / (2 - 2 * blue), (np.array([1, 0, 0]) - luma) / (2 - 2 * red)]
    )
    yuv = frames @ to_yuv.T
    num_frames, height, width = frames.shape[:3]
    chroma = yuv[..., 1:].reshape(num_frames, height // 2, 2, width // 2, 2, 2).mean((2, 4))
    yuv[..., 1:] = chroma.repeat(2, 1).repeat(2, 2)
    return yuv @ np.linalg.inv(to_yuv).T


@pytest.mark.parametrize("color", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (12, 200, 99)])
def test_colours_keep_their_hue(color: tuple[int, int, int]) -> None:
    frames = np.full((3, 32, 32, 3), color, np.uint8)
    assert np.abs(decode_media(*encode_media(frames)).astype(int) - frames).max() <= 3


def test_what_players_need_is_in_the_file() -> None:
    data, _ = encode_media(VIDEO, fps=24)
    assert data.index(b"moov") < data.index(b"mdat")
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.average_rate, stream.frames) == (24, len(VIDEO))
        assert (stream.width, stream.height) == (80, 48)
        assert container.duration == pytest.approx(len(VIDEO) / 24 * av.time_base, rel=1e-3)


def test_odd_rates_are_kept_as_fractions() -> None:
    with av.open(io.BytesIO(encode_media(VIDEO, fps=24000 / 1001)[0])) as container:
        assert container.streams.video[0].average_rate == Fraction(24000, 1001)


def test_equal_frames_make_equal_bytes() -> None:
    assert encode_media(VIDEO)[0] == MP4
    assert encode_media(np.asfortranarray(VIDEO))[0] == MP4
    rng, used = np.random.default_rng(0), []
    for _ in range(200):  # whatever its memory held before
        used.append(np.full(rng.integers(1, 300_000), rng.integers(256), np.uint8))
        if len(used) > 40:
            used.pop(rng.integers(40))
        assert encode_media(VIDEO)[0] == MP4


@pytest.mark.parametrize(
    ("frames", "fps", "message"),
    [
        (np.zeros((2, 8, 8), np.uint8), 16.0, "must be .F, H, W, 3. uint8"),
        (np.zeros((2, 8, 8, 3), np.float32), 16.0, "float32"),
        (np.zeros((0, 8, 8, 3), np.uint8), 16.0, "must be .F, H, W, 3. uint8"),
        (np.zeros((2, 7, 8, 3), np.uint8), 16.0, "must be even, but they are 7 and 8"),
        (np.zeros((2, 8, 8, 3), np.uint8), 0.0, "fps"),
        (np.zeros((2, 8, 8, 3), np.uint8), float("nan"), "fps"),
    ],
)
def test_frames_that_cannot_be_encoded_are_refused(frames: Frames, fps: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_media(frames, fps)


@pytest.mark.parametrize("options", [{}, {"movflags": "frag_keyframe+empty_moov"}])
def test_videos_of_other_programs_are_read(options: dict[str, str]) -> None:
    frames = decode_media(mp4(VIDEO, **options), "video/mp4")
    assert frames.shape == VIDEO.shape
    assert np.abs(frames.astype(int) - VIDEO).mean() < 6


def test_the_header_tells_what_will_be_decoded() -> None:
    opened = open_media(MP4, "video/mp4")
    assert (opened.num_frames, opened.height, opened.width) == VIDEO.shape[:3]
    assert opened.num_pixels == VIDEO[..., 0].size


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (MediaLimits(max_bytes=len(MP4) - 1), f"{len(MP4)} bytes: send at most {len(MP4) - 1}"),
        (MediaLimits(max_pixels=48 * 80 - 1), "video is 80 x 48: at most 3839 pixels"),
        (MediaLimits(max_side=79), "79 a side"),
        (MediaLimits(max_frames=8), "9 frames of 80 x 48: at most 8 frames"),
        (MediaLimits(max_total_pixels=9 * 48 * 80 - 1), "34559 pixels together"),
    ],
)
def test_what_is_over_a_limit_is_refused_before_decoding(limits: MediaLimits, message: str) -> None:
    with pytest.raises(MediaError, match=re.escape(message)) as caught:
        open_media(MP4, "video/mp4", limits)
    assert caught.value.reason == "too_large"


def test_limits_that_are_just_met_let_the_video_pass() -> None:
    limits = MediaLimits(len(MP4), 48 * 80, 80, 9, 9 * 48 * 80)
    assert decode_media(MP4, "video/mp4", limits).shape == VIDEO.shape


def test_limits_hold_for_pictures_too() -> None:
    picture, media_type = encode_media(VIDEO[:1])
    assert refused(picture, media_type, MediaLimits(max_pixels=48 * 80 - 1)).reason == "too_large"


def test_a_picture_is_turned_as_its_camera_was() -> None:
    """EXIF orientation 6: the file's rows are the columns from top to bottom, its first row the right-hand one."""
    exif, out = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    Image.fromarray(VIDEO[0]).save(out, "PNG", exif=exif)
    (frame,) = decode_media(out.getvalue(), "image/png")
    assert np.array_equal(frame, VIDEO[0][::-1].transpose(1, 0, 2))


def test_what_is_no_video_is_refused() -> None:
    picture = encode_media(VIDEO[:1])[0]
    for data in (b"", b"not a video", picture, MP4[:32]):
        error = refused(data)
        assert error.reason == "undecodable"
        assert f"{len(data)} bytes of media are not a whole video/mp4" in str(error)
    assert refused(MP4, "image/png").reason == "undecodable"
    assert refused(MP4, "video/webm").reason == "media_type"
    assert "image/png, image/jpeg, image/webp, video/mp4" in str(refused(MP4, ""))


def test_codecs_that_are_not_listed_are_refused() -> None:
    assert "its codec is none of" in str(refused(mp4(VIDEO, "mpeg1video")))


def test_a_cut_file_is_refused() -> None:
    for share in (0.3, 0.6, 0.9, 0.99):
        assert refused(MP4[: int(share * len(MP4))]).reason == "undecodable"


def test_sound_alone_is_refused() -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert "there is no video in it" in str(refused(out.getvalue()))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(MP4) - 1), st.binary(min_size=1, max_size=40))
def test_broken_bytes_raise_nothing_else(at: int, patch: bytes) -> None:
    limits = MediaLimits(max_total_pixels=2 * VIDEO[..., 0].size)
    with suppress(MediaError):
        frames = decode_media(MP4[:at] + patch + MP4[at + len(patch) :], "video/mp4", limits)
        assert 0 < frames[..., 0].size <= limits.max_total_pixels


MODES = {
    "image/png": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B"),
    "image/jpeg": ("1", "L", "RGB", "RGBX", "CMYK", "YCbCr"),
    "image/webp": ("1", "L", "LA", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"),
}
"""Modes of PIL that it writes to a type without cutting anything off."""


@pytest.mark.parametrize(("media_type", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_a_ramp_is_read_as_a_ramp_in_every_mode(mode: str, media_type: str) -> None:
    ramp = np.arange(256, dtype=np.uint8)[None].repeat(16, axis=0)
    if mode.startswith("I"):
        wide = ramp.astype(np.uint16) * 257
        picture = Image.frombytes(mode, (256, 16), (wide.byteswap() if mode == "I;16B" else wide).tobytes())
    elif mode == "1":
        ramp = np.where(ramp > 127, np.uint8(255), np.uint8(0))
        picture = Image.fromarray(ramp).convert("1", dither=Image.Dither.NONE)
    else:
        gray = Image.fromarray(ramp)
        picture = (gray if mode == "P" else gray.convert("RGB")).convert(mode)
    out = io.BytesIO()
    picture.save(out, PICTURE_TYPES[media_type], quality=95)
    found = decode_media(out.getvalue(), media_type)[0].astype(int)
    is_exact = media_type == "image/png"
    assert np.abs(found - ramp[..., None].astype(int)).max() <= (0 if is_exact else 8)
    assert (np.diff(found.mean(axis=(0, 2))) >= (0 if is_exact else -4)).all()
