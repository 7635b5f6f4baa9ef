"""Two plain numbers of a picture that a hacked reward moves: how much edge it has, and how many colors. Free of torch.

A policy that games its reward (text scribbled everywhere, flat boards that a recognizer misreads, noise that fools a
classifier) shifts their means over the validation pictures long before anybody looks; honest learning hardly does.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowfleet.media.files import decode_media

BITS_PER_CHANNEL = 3
"""The color histogram has 8 bins a channel, 512 in all: finer ones would measure noise."""


@dataclass(frozen=True)
class ImageStats:
    """`edge_density` in gray levels, 0 … 510; `colour_entropy` in bits, 0 … 9."""

    edge_density: float
    colour_entropy: float


def image_stats(media: bytes, media_type: str = "image/png") -> ImageStats:
    """Statistics of a picture, or of a video's first frame. ValueError when it cannot be decoded."""
    pixels = decode_media(media, media_type)[0]
    return ImageStats(edge_density(pixels), colour_entropy(pixels))


def edge_density(pixels: NDArray[np.uint8]) -> float:
    """Mean |difference| of vertical neighbors plus that of horizontal ones, of the gray picture; 0 for a single row.

    pixels: (H, W, 3) uint8. Gray is the plain mean of the three channels, in 0 … 255.
    """
    wide = pixels.astype(np.int16)
    thrice_gray = wide[:, :, 0] + wide[:, :, 1] + wide[:, :, 2]
    steps = [np.abs(np.diff(thrice_gray, axis=axis)) for axis in (0, 1) if thrice_gray.shape[axis] > 1]
    return sum(float(step.mean()) for step in steps) / 3


def colour_entropy(pixels: NDArray[np.uint8]) -> float:
    """Shannon entropy in bits of the color histogram with 8 bins a channel: −Σ p log2 p. pixels: (H, W, 3) uint8."""
    bins = pixels.astype(np.int16) >> (8 - BITS_PER_CHANNEL)
    colors = (bins[:, :, 0] << 2 * BITS_PER_CHANNEL) + (bins[:, :, 1] << BITS_PER_CHANNEL) + bins[:, :, 2]
    counts = np.bincount(colors.ravel())
    shares = counts[counts > 0] / colors.size
    return max(0.0, -float((shares * np.log2(shares)).sum()))


def colourfulness(pixels: NDArray[np.uint8]) -> float:
    """σ + 0.3 μ of the opponent colors rg = R − G and yb = (R + G) / 2 − B, where σ² and μ² are the sums of both
    variances and of both squared means: 0 for gray, about 33 for moderate and 109 for extreme colors.

    Source: Hasler and Süsstrunk, "Measuring colourfulness in natural images", Human Vision and Electronic Imaging VIII,
    2003, section 7. pixels: (H, W, 3) uint8.
    """
    red, green, blue = (pixels[:, :, channel].astype(np.float32) for channel in range(3))
    opponents = (red - green, (red + green) / 2 - blue)
    spread = sum(float(color.var(dtype=np.float64)) for color in opponents)
    shift = sum(float(color.mean(dtype=np.float64)) ** 2 for color in opponents)
    return float(spread**0.5 + 0.3 * shift**0.5)


def gray_of(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(H, W) in 0 … 1: the plain mean of the channels. pixels: (H, W, 3) uint8."""
    wide = pixels.astype(np.int16)
    gray: NDArray[np.float32] = (wide[:, :, 0] + wide[:, :, 1] + wide[:, :, 2]).astype(np.float32) / np.float32(765)
    return gray


def halved(gray: NDArray[np.float32]) -> NDArray[np.float32]:
    """Means of 2 × 2 pixels; an odd last row or column is dropped."""
    even = gray[: gray.shape[0] // 2 * 2, : gray.shape[1] // 2 * 2]
    half: NDArray[np.float32] = (even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]) / np.float32(4)
    return half


def total_variation(gray: NDArray[np.float32]) -> tuple[float, float]:
    """Mean |d| and mean d² of neighbors' differences d, over both axes; 0 for a single pixel."""
    steps = [np.diff(gray, axis=axis).ravel() for axis in (0, 1) if gray.shape[axis] > 1]
    number = sum(step.size for step in steps)
    if not number:
        return 0.0, 0.0
    return (
        sum(float(np.abs(step).sum(dtype=np.float64)) for step in steps) / number,
        sum(float(step @ step) for step in steps) / number,
    )
