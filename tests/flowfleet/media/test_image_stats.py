from __future__ import annotations

import io
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from flowfleet.media.files import encode_media
from flowfleet.media.image_stats import ImageStats, colour_entropy, edge_density, image_stats

Pixels = NDArray[np.uint8]


def png(pixels: Pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def gray(rows: list[list[int]]) -> Pixels:
    return np.repeat(np.array(rows, dtype=np.uint8)[:, :, None], 3, axis=2)


def noise(seed: int, height: int, width: int) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_flat_picture_has_neither() -> None:
    assert image_stats(png(np.full((5, 7, 3), 200, dtype=np.uint8))) == ImageStats(0.0, 0.0)


def test_a_chessboard_has_the_most_edge_and_one_bit_of_color() -> None:
    board = gray([[255 * ((row + column) % 2) for column in range(8)] for row in range(8)])
    assert image_stats(png(board)) == ImageStats(510.0, 1.0)


def test_edges_are_weighed_by_their_height_and_share() -> None:
    """One vertical step of 30 in the middle of four columns: 30 in one of three neighbors a row, none between rows."""
    assert edge_density(gray([[10, 10, 40, 40]] * 3)) == pytest.approx(30 / 3)
    assert edge_density(gray([[10, 10, 40, 40]] * 3).transpose(1, 0, 2)) == pytest.approx(30 / 3)


def test_a_step_in_one_channel_is_a_third_of_a_gray_one() -> None:
    pixels = gray([[10, 10]])
    pixels[0, 1, 1] = 40
    assert edge_density(pixels) == pytest.approx(10.0)


def test_every_bin_once_is_nine_bits() -> None:
    levels = np.arange(8, dtype=np.uint8) * 32 + 5
    every = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(16, 32, 3)
    assert colour_entropy(every) == pytest.approx(9.0, abs=1e-12)


def test_shades_inside_a_bin_are_one_color() -> None:
    assert colour_entropy(gray([[0, 31], [16, 8]])) == 0.0
    assert colour_entropy(gray([[0, 32], [16, 8]])) == pytest.approx(-(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6))
def test_both_are_their_definitions(seed: int, height: int, width: int) -> None:
    pixels = noise(seed, height, width)
    levels = [[sum(int(value) for value in pixel) / 3 for pixel in row] for row in pixels]
    across = [abs(row[x + 1] - row[x]) for row in levels for x in range(width - 1)]
    down = [abs(levels[y + 1][x] - levels[y][x]) for y in range(height - 1) for x in range(width)]
    expected = sum(math.fsum(steps) / len(steps) for steps in (across, down) if steps)
    assert edge_density(pixels) == pytest.approx(expected, abs=1e-9)
    bins = Counter(tuple(int(value) // 32 for value in pixel) for row in pixels for pixel in row)
    shares = [count / (height * width) for count in bins.values()]
    assert colour_entropy(pixels) == pytest.approx(-sum(share * math.log2(share) for share in shares), abs=1e-9)


def test_other_modes_count_as_rgb() -> None:
    buffer = io.BytesIO()
    Image.new("L", (4, 4), 90).save(buffer, "PNG")
    assert image_stats(buffer.getvalue()) == ImageStats(0.0, 0.0)


@pytest.mark.parametrize("media", [b"", b"no picture", png(noise(0, 16, 16))[:120]])
def test_what_is_no_picture_is_refused(media: bytes) -> None:
    with pytest.raises(ValueError, match=f"{len(media)} bytes of media are not a whole image/png"):
        image_stats(media)


def test_of_a_video_the_first_frame_counts() -> None:
    """Gray of one level survives the codec to the bit, whatever comes after it."""
    frames = np.stack([np.full((16, 16, 3), 120, np.uint8), *(noise(k, 16, 16) for k in range(3))])
    media, media_type = encode_media(frames)
    assert media_type == "video/mp4"
    assert image_stats(media, media_type) == ImageStats(0.0, 0.0)
    with pytest.raises(ValueError, match="not a whole image/png"):
        image_stats(media)
