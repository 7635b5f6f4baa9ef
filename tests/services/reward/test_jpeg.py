from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from services.reward.scorer import Sample, Score
from services.reward.scorers.jpeg import JpegCompressibility, JpegIncompressibility
from tests.services.reward.pictures import sign


def pil_kilobytes(image: Image.Image) -> float:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95)
    return len(buffer.getvalue()) / 1000.0


def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 64, 3), dtype=np.uint8))


def test_scores_are_the_sizes_that_pil_writes() -> None:
    images = [sign("AB7"), noise(), Image.new("RGB", (64, 64))]
    samples = [Sample.of_picture(image, "any") for image in images]
    sizes = [pil_kilobytes(image) for image in images]
    assert JpegIncompressibility().score(samples, None) == [Score(size, {"size_kb": size}) for size in sizes]
    assert JpegCompressibility().score(samples, None) == [Score(-size, {"size_kb": size}) for size in sizes]
    assert sizes[1] > sizes[0] > sizes[2]


def test_a_video_has_the_mean_size_of_evenly_spaced_frames() -> None:
    frames = np.random.default_rng(1).integers(0, 256, (15, 32, 48, 3), np.uint8)
    for t, frame in enumerate(frames):
        frame[:, 3 * t :] = 128  # each of another size
    sizes = [pil_kilobytes(Image.fromarray(frames[place])) for place in (0, 2, 4, 6, 8, 10, 12, 14)]
    (outcome,) = JpegIncompressibility().score([Sample(frames, "")], None)
    assert isinstance(outcome, Score)
    assert outcome.value == pytest.approx(np.mean(sizes), rel=1e-12)
    assert outcome.components == {"size_kb": outcome.value}
    (short,) = JpegCompressibility().score([Sample(frames[:3], "")], None)
    assert isinstance(short, Score)
    assert short.value == pytest.approx(-np.mean([pil_kilobytes(Image.fromarray(frame)) for frame in frames[:3]]))


def test_described_range_holds() -> None:
    for scorer in (JpegIncompressibility(), JpegCompressibility()):
        (outcome,) = scorer.score([Sample.of_picture(noise(), "")], None)
        assert isinstance(outcome, Score)
        assert scorer.score_range[0] <= outcome.value <= scorer.score_range[1]
        assert set(outcome.components) == set(scorer.components)


def test_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"params\.quality is unknown: this scorer takes no parameters"):
        JpegCompressibility().parse({"quality": "50"})
