from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from services.reward.scorers.base import Sample, Score
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
    samples = [Sample(image, "any") for image in images]
    sizes = [pil_kilobytes(image) for image in images]
    assert JpegIncompressibility().score(samples, None) == [Score(size, {"size_kb": size}) for size in sizes]
    assert JpegCompressibility().score(samples, None) == [Score(-size, {"size_kb": size}) for size in sizes]
    assert sizes[1] > sizes[0] > sizes[2]


def test_described_range_holds() -> None:
    for scorer in (JpegIncompressibility(), JpegCompressibility()):
        (outcome,) = scorer.score([Sample(noise(), "")], None)
        assert isinstance(outcome, Score)
        assert scorer.score_range[0] <= outcome.value <= scorer.score_range[1]
        assert set(outcome.components) == set(scorer.components)


def test_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"params\.quality is unknown: this scorer takes no parameters"):
        JpegCompressibility().parse({"quality": "50"})
