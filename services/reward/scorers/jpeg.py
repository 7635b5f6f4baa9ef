"""How small, or how large, a picture is as JPEG: the two rewards that need no model.

Source: Black et al., "Training Diffusion Models with Reinforcement Learning" (DDPO), arXiv 2305.13301, section 5.1, and
the code published with it: the size in kilobytes (1,000 bytes) of the picture as JPEG of quality 95, negative for
compressibility. flow_grpo divides compressibility by 500 besides; give the reward the weight 0.002 for the same scale.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from PIL.Image import Image

from services.reward.scorers.base import Outcome, Sample, Score, Scorer, read_params

QUALITY = 95


def jpeg_kilobytes(image: Image) -> float:
    """Size of the RGB picture as JPEG of quality 95, in units of 1,000 bytes."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / 1000


class _JpegScorer(Scorer[None]):
    version = "1"
    components = ("size_kb",)
    sign: ClassVar[float]

    def parse(self, params: Mapping[str, str]) -> None:
        read_params(params, {})

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        sizes = [jpeg_kilobytes(sample.image) for sample in samples]
        return [Score(self.sign * size, {"size_kb": size}) for size in sizes]


class JpegIncompressibility(_JpegScorer):
    """Rewards detail: the size in kilobytes."""

    name = "jpeg_incompressibility"
    score_range = (0.0, math.inf)
    sign = 1.0


class JpegCompressibility(_JpegScorer):
    """Rewards smoothness: minus the size in kilobytes."""

    name = "jpeg_compressibility"
    score_range = (-math.inf, 0.0)
    sign = -1.0
