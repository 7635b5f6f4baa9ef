"""How small, or how large, a picture is as JPEG: the two rewards that need no model.

Source: Black et al., "Training Diffusion Models with Reinforcement Learning" (DDPO), arXiv 2305.13301, section 5.1, and
the code published with it: the size in kilobytes (1,000 bytes) of the picture as JPEG of quality 95, negative for
compressibility. flow_grpo divides compressibility by 500 besides; give the reward the weight 0.002 for the same scale.
Of a video the size is the mean over at most 8 evenly spaced frames, each as a JPEG of its own.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from PIL.Image import Image

from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_VIDEO
from services.reward.scorer import Outcome, PlainScorer, Sample, Score, mean_score

QUALITY = 95


def jpeg_kilobytes(image: Image) -> float:
    """Size of the RGB picture as JPEG of quality 95, in units of 1,000 bytes."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / 1000


class _JpegScorer(PlainScorer):
    version = "1"
    modalities = (MODALITY_IMAGE, MODALITY_VIDEO)
    components = ("size_kb",)
    sign: ClassVar[float]

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        return [mean_score([self._judge(picture) for picture in sample.pictures()]) for sample in samples]

    def _judge(self, picture: Image) -> Score:
        size = jpeg_kilobytes(picture)
        return Score(self.sign * size, {"size_kb": size})


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


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> PlainScorer:
    return JpegCompressibility() if name == JpegCompressibility.name else JpegIncompressibility()
