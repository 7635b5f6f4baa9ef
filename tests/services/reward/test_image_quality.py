"""The guard: its formulas against closed forms, and what must score low against what must not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from flowfleet.media.image_stats import colourfulness, gray_of, halved, total_variation
from services.reward.scorer import Sample, Score, Scorer
from services.reward.scorers import make
from services.reward.scorers.image_quality import quality
from tests.services.reward.pictures import page, sign

Pixels = NDArray[np.uint8]


def value(picture: Image.Image | Pixels) -> float:
    return quality(np.asarray(picture)).value


def noise(size: int, block: int = 1, channels: int = 3) -> Pixels:
    small = np.random.default_rng(0).integers(0, 256, (size // block, size // block, channels), dtype=np.uint8)
    return np.broadcast_to(small.repeat(block, 0).repeat(block, 1), (size, size, 3)).copy()


def pink(size: int) -> Pixels:
    """Amplitudes as 1 / frequency, which natural pictures have: Field, J. Opt. Soc. Am. A 4 (1987)."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size))
    frequency[0, 0] = 1.0
    white = np.random.default_rng(0).normal(size=(3, size, size))
    made = np.fft.ifft2(np.fft.fft2(white) / frequency).real
    picture: Pixels = ((made - made.mean()) / made.std() * 50 + 128).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    return picture


def test_colourfulness_is_that_of_its_paper() -> None:
    """Two halves, red and green: rg = ±255, yb = 127.5 throughout, so σ = 255 and μ = 127.5."""
    halves = np.zeros((4, 4, 3), np.uint8)
    halves[:2, :, 0] = halves[2:, :, 1] = 255
    assert colourfulness(halves) == pytest.approx(255 + 0.3 * 127.5)
    assert colourfulness(np.full((4, 4, 3), 77, np.uint8)) == 0.0
    blue = np.tile(np.array([0, 0, 200], np.uint8), (4, 4, 1))
    assert colourfulness(blue) == pytest.approx(0.3 * 200)


def test_variation_of_a_step_doubles_when_halved_and_that_of_noise_halves() -> None:
    step = np.zeros((64, 64, 3), np.uint8)
    step[:, 32:] = 153
    gray = gray_of(step)
    assert total_variation(gray) == pytest.approx((0.6 * 64 / (2 * 63 * 64), 0.36 * 64 / (2 * 63 * 64)))
    assert total_variation(halved(gray))[0] == pytest.approx(0.6 * 32 / (2 * 31 * 32))
    gray = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    means = [total_variation(one)[0] for one in (gray, halved(gray), halved(halved(gray)))]
    assert means == pytest.approx([2 / math.sqrt(math.pi) / 2**octave for octave in range(3)], rel=0.02)


@pytest.mark.parametrize("size", [64, 256])
def test_what_is_no_picture_scores_low(size: int) -> None:
    y, x = np.mgrid[:size, :size]
    chequers = np.repeat(((x + y) % 2 * 255).astype(np.uint8)[..., None], 3, 2)
    ramp = np.stack([x * 255 // size, y * 255 // size, x * 0 + 99], 2).astype(np.uint8)
    broken = {
        "blank": np.full((size, size, 3), 128, np.uint8),
        "red": np.tile(np.array([255, 0, 0], np.uint8), (size, size, 1)),
        "noise": noise(size),
        "gray noise": noise(size, channels=1),
        "coarse noise": noise(size, block=2),
        "chequers": chequers,
        "smooth": ramp,
    }
    values = {name: value(picture) for name, picture in broken.items()}
    assert {name for name, found in values.items() if found > 0.35} == set(), values


def test_pictures_score_high() -> None:
    pictures: list[Any] = [sign("AB3"), sign("K7QX", 2), sign("WXYZ", 3), page(("Exit 42", 0.2, 0.3, 40)), pink(256)]
    assert min(map(value, pictures)) > 0.7
    assert all(value(picture) <= 1.0 for picture in pictures)


def test_each_fault_costs() -> None:
    sound = sign("AB3", 3)
    pixels = np.asarray(sound).astype(float)
    grain = np.random.default_rng(0).normal(0, 60, pixels.shape)
    faults: list[Any] = [
        sound.filter(ImageFilter.GaussianBlur(2)),
        (pixels + grain).clip(0, 255).astype(np.uint8),
        (pixels * 0.1 + 100).astype(np.uint8),
        np.where(pixels > 100, 255, 0).astype(np.uint8),
    ]
    assert max(map(value, faults)) < value(sound) - 0.05
    blurs = [value(sound.filter(ImageFilter.GaussianBlur(radius))) for radius in (1, 2, 4)]
    assert blurs == sorted(blurs, reverse=True)


def test_any_size_of_picture_gets_a_finite_score() -> None:
    for shape in ((1, 1), (1, 7), (3, 2), (5, 4)):
        found = quality(np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8))
        assert all(map(math.isfinite, (found.value, *found.components.values())))
        assert 0.0 <= found.value <= 1.0


def test_of_a_video_the_mean_counts() -> None:
    scorer = make("image_quality", {}, 1)
    assert isinstance(scorer, Scorer)
    frames = np.stack([np.asarray(sign("AB3")), np.full((64, 64, 3), 128, np.uint8)])
    found = scorer.score([Sample(frames, "")], None)[0]
    assert isinstance(found, Score)
    assert found.value == pytest.approx(value(sign("AB3")) / 2)
    assert set(found.components) == set(scorer.components)
