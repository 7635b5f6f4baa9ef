"""`image_quality` of pixels with a gradient: the formulas of __init__.py, of which two count pixels and so have
none, softened.

- A pixel of the color histogram is shared between the two nearest of the 8 levels of each channel, by its distance
  from their middles.
- A pixel counts as wholly black, or wholly white, the more it is so: from 1 at the level of __init__.py to 0 at a
  distance of 8 levels.

The parts are clipped as there: a part that is full, or empty, has no gradient.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowfleet.rewards.gradients import PixelInput
from services.reward.networks.pixels import gradients_of, leaves_of
from services.reward.scorers.image_quality import (
    BLACK,
    CLEAN_RATIO,
    FULL_COLORS,
    FULL_CONTRAST,
    FULL_SATURATION,
    FULL_SLOPE,
    NOISE_RATIO,
    WHITE,
)

LEVELS = 8
"""Levels a channel of the color histogram."""
SOFT = 8.0
"""Levels of 255: how far from black or white a pixel still counts as such in part."""
_TINY = 1e-12


def with_gradient(sample: PixelInput) -> tuple[float, NDArray[np.float32]]:
    """Score of a picture, and its gradient (3, H, W)."""
    leaves = leaves_of([sample], torch.device("cpu"))
    score = soft_quality(leaves[0])
    (gradient,) = gradients_of(score[None], leaves)
    return float(score.detach()), gradient


def soft_quality(pixels: Tensor) -> Tensor:
    """0-d, from 0 to 1, of pixels (3, H, W) from 0 to 1."""
    gray = pixels.mean(dim=0)
    clean, sharpness = _detail(gray)
    contrast = _clip(gray.std(correction=0) / FULL_CONTRAST)
    low, high = pixels.amin(dim=0), pixels.amax(dim=0)
    dark = _clip((BLACK + SOFT - 255 * high) / SOFT)
    bright = _clip((255 * low - WHITE + SOFT) / SOFT)
    tones = _clip(2 - 2 * torch.maximum(dark, bright).mean())
    colors = _clip(soft_entropy(pixels) / FULL_COLORS)
    spread = ((high - low) / high.clamp_min(1 / 255)).mean()
    saturation = _clip((1 - spread) / (1 - FULL_SATURATION))
    product = sharpness * clean * contrast * tones * colors * saturation
    root: Tensor = torch.where(product > 0, product.clamp_min(_TINY) ** (1 / 3), 0 * product)
    return root


def soft_entropy(pixels: Tensor) -> Tensor:
    """Entropy in bits of the shared color histogram of pixels (3, H, W)."""
    places = (pixels.flatten(1) * LEVELS - 0.5).clamp(0, LEVELS - 1)  # 0: the middle of the first level
    lower = places.detach().floor().clamp(max=LEVELS - 2)
    share = places - lower
    lower = lower.long()
    counts = pixels.new_zeros(LEVELS**3)
    for corner in range(8):
        ups = [corner >> channel & 1 for channel in range(3)]
        weight = torch.stack([share[c] if up else 1 - share[c] for c, up in enumerate(ups)]).prod(dim=0)
        bins = sum((lower[c] + up) * LEVELS ** (2 - c) for c, up in enumerate(ups))
        counts = counts.index_add(0, torch.as_tensor(bins), weight)
    shares = counts / pixels[0].numel()
    entropy: Tensor = -(shares * shares.clamp_min(_TINY).log2()).sum()
    return entropy


def _detail(gray: Tensor) -> tuple[Tensor, Tensor]:
    """clean, and slope."""
    half = _halved(gray)
    variation, energy = _variation(gray)
    coarser, coarsest = _variation(half)[0], _variation(_halved(half))[0]
    if not bool(variation):
        return torch.ones_like(variation), variation
    ratio = torch.minimum(coarser / variation, coarsest / coarser if bool(coarser) else 0 * coarser)
    clean = _clip((ratio - NOISE_RATIO) / (CLEAN_RATIO - NOISE_RATIO))
    return clean, _clip(energy / variation / FULL_SLOPE)


def _halved(gray: Tensor) -> Tensor:
    even = gray[: gray.shape[0] // 2 * 2, : gray.shape[1] // 2 * 2]
    return (even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]) / 4


def _variation(gray: Tensor) -> tuple[Tensor, Tensor]:
    """Mean |d| and mean d² of neighbors' differences d over both axes; 0 for a single pixel."""
    steps = torch.cat([gray.diff(dim=axis).flatten() for axis in (0, 1)])
    if not len(steps):
        return 0 * gray.sum(), 0 * gray.sum()
    return steps.abs().mean(), steps.square().mean()


def _clip(value: Tensor) -> Tensor:
    return value.clamp(0, 1)
