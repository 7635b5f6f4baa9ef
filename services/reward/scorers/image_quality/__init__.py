"""`image_quality`: is it a picture at all? The guard against policies that please another reward with blank boards,
noise, blur or glare. It needs no model and knows no beauty: what is sound scores near 1, what is broken near 0.

With gray g = (R + G + B) / 3 in 0 … 1, its neighbors' differences d over both axes, g' the picture halved by means of
2 × 2 pixels, and each part clipped to 0 … 1:

- slope: Σ d² / Σ |d| / 0.15. The mean step at edges: an edge of height h spread over w pixels has h / w, so blur lowers
  it and their number does not matter. Source of the idea, energy of the gradient as focus measure: Pertuz et al.,
  "Analysis of focus measure operators", Pattern Recognition 46 (2013).
- clean: (r − 0.55) / 0.35 with r = mean |d| of g' / mean |d| of g, the lesser of two halvings in turn. An edge keeps
  its height when the picture is halved, so that r is 2; of independent noise the average of four has half the
  deviation, and r is 0.5; a pixel-wise chequerboard has 0.
- contrast: deviation of g / 0.12.
- tones: 2 − 2 c where c is the share of pixels that are wholly black (all channels at most 2) or wholly white (at least
  253): half of a picture may be so.
- `colours`: entropy of the histogram of 8 levels a channel / 2 bits.
- saturation: (1 − s) / 0.25 with s the mean of (max − min) / max of the channels: full until a mean of 0.75.

detail = slope × clean, tone = contrast × tones, color = `colours` × saturation; the score is their geometric mean,
(detail × tone × color)^(1/3). Of a video, score and components are means over at most 8 evenly spaced frames. Its
gradient, where torch is installed, is that of a softened score (gradient.py).
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowfleet.media.image_stats import colour_entropy, colourfulness, gray_of, halved, total_variation
from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_VIDEO
from flowfleet.rewards.gradients import PixelInput
from services.reward.scorer import GradientOutcome, Outcome, PlainScorer, Sample, Score, ScoreGradient, mean_score

FULL_SLOPE = 0.15
NOISE_RATIO, CLEAN_RATIO = 0.55, 0.9
FULL_CONTRAST = 0.12
BLACK, WHITE = 2, 253
FULL_COLORS = 2.0
FULL_SATURATION = 0.75


class ImageQuality(PlainScorer):
    """Components: `sharpness` (the detail above), `clean`, `contrast`, `tones`, `colours`, `saturation` (parts above),
    and `colourfulness` (Hasler and Süsstrunk's, 0 … some 150, which the score leaves out)."""

    name = "image_quality"
    version = "1"
    modalities = (MODALITY_IMAGE, MODALITY_VIDEO)
    score_range = (0.0, 1.0)
    components = ("sharpness", "clean", "contrast", "tones", "colours", "saturation", "colourfulness")
    gives_gradient = find_spec("torch") is not None

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        return [mean_score([quality(np.asarray(picture)) for picture in sample.pictures()]) for sample in samples]

    def score_with_gradient(self, samples: Sequence[PixelInput], params: None) -> list[GradientOutcome]:
        from services.reward.scorers.image_quality.gradient import with_gradient  # the scorer itself needs no torch

        return [ScoreGradient(*with_gradient(sample)) for sample in samples]


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> ImageQuality:
    return ImageQuality()


def quality(pixels: NDArray[np.uint8]) -> Score:
    """The score of one picture, as above. pixels: (H, W, 3) uint8."""
    gray = gray_of(pixels)
    sharpness, clean = _detail(gray)
    contrast = _clip(float(gray.std(dtype=np.float64)) / FULL_CONTRAST)
    low, high = pixels.min(axis=2), pixels.max(axis=2)
    tones = _clip(2 - 2 * float(np.count_nonzero((high <= BLACK) | (low >= WHITE)) / high.size))
    colors = _clip(colour_entropy(pixels) / FULL_COLORS)
    saturation = _clip((1 - _saturation(low, high)) / (1 - FULL_SATURATION))
    value = (sharpness * contrast * tones * colors * saturation) ** (1 / 3)
    parts = (sharpness, clean, contrast, tones, colors, saturation, colourfulness(pixels))
    return Score(value, dict(zip(ImageQuality.components, parts, strict=True)))


def _detail(gray: NDArray[np.float32]) -> tuple[float, float]:
    """slope × clean, and clean."""
    half = halved(gray)
    variation, energy = total_variation(gray)
    coarser, _ = total_variation(half)
    coarsest, _ = total_variation(halved(half))
    if not variation:
        return 0.0, 1.0
    ratio = min(coarser / variation, coarsest / coarser if coarser else 0.0)
    clean = _clip((ratio - NOISE_RATIO) / (CLEAN_RATIO - NOISE_RATIO))
    return _clip(energy / variation / FULL_SLOPE) * clean, clean


def _saturation(low: NDArray[np.uint8], high: NDArray[np.uint8]) -> float:
    """Mean of (max − min) / max; black has none."""
    chroma = (high - low).astype(np.float32)
    return float((chroma / np.maximum(high, np.uint8(1))).mean(dtype=np.float64))


def _clip(value: float) -> float:
    return min(max(value, 0.0), 1.0)
