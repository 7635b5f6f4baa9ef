"""Two plain numbers of a picture that a hacked reward moves: how much edge it has, and how many colours. Free of torch.

A policy that games its reward (text scribbled everywhere, flat boards that a recogniser misreads, noise that fools a
classifier) shifts their means over the validation pictures long before anybody looks; honest learning hardly does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowfleet.media import decode_media

BITS_PER_CHANNEL = 3
"""The colour histogram has 8 bins a channel, 512 in all: finer ones would measure noise."""


@dataclass(frozen=True)
class ImageStats:
    """`edge_density` in grey levels, 0 … 510; `colour_entropy` in bits, 0 … 9."""

    edge_density: float
    colour_entropy: float


def image_stats(media: bytes, media_type: str = "image/png") -> ImageStats:
    """Statistics of a picture, or of a video's first frame. ValueError when it cannot be decoded."""
    pixels = decode_media(media, media_type)[0]
    return ImageStats(edge_density(pixels), colour_entropy(pixels))


def edge_density(pixels: NDArray[np.uint8]) -> float:
    """Mean |difference| of vertical neighbours plus that of horizontal ones, of the grey picture; 0 for a single row.

    pixels: (H, W, 3) uint8. Grey is the plain mean of the three channels, in 0 … 255.
    """
    wide = pixels.astype(np.int16)
    thrice_grey = wide[:, :, 0] + wide[:, :, 1] + wide[:, :, 2]
    steps = [np.abs(np.diff(thrice_grey, axis=axis)) for axis in (0, 1) if thrice_grey.shape[axis] > 1]
    return sum(float(step.mean()) for step in steps) / 3


def colour_entropy(pixels: NDArray[np.uint8]) -> float:
    """Shannon entropy in bits of the colour histogram with 8 bins a channel: −Σ p log2 p. pixels: (H, W, 3) uint8."""
    bins = pixels.astype(np.int16) >> (8 - BITS_PER_CHANNEL)
    colours = (bins[:, :, 0] << 2 * BITS_PER_CHANNEL) + (bins[:, :, 1] << BITS_PER_CHANNEL) + bins[:, :, 2]
    counts = np.bincount(colours.ravel())
    shares = counts[counts > 0] / colours.size
    return max(0.0, -float((shares * np.log2(shares)).sum()))
