"""An image processor of transformers as a function that gradients flow through: resize, crop, normalize.

The resizing is PIL's: torch's with `antialias` has the same kernels. PIL rounds its result to 8 bits, this does not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from flowfleet.rewards.gradients import PixelInput

_MODES = {2: "bilinear", 3: "bicubic"}
"""PIL's numbers of filters to torch's modes."""


def leaves_of(samples: Sequence[PixelInput], device: torch.device) -> list[Tensor]:
    """(3, H, W) float32 on the device each, which gradients are asked of."""
    return [torch.tensor(sample.pixels, device=device).requires_grad_() for sample in samples]


def gradients_of(scores: Tensor, leaves: Sequence[Tensor]) -> list[NDArray[np.float32]]:
    """Gradient of each score (N,) by its own pixels, of which no other score depends. A picture that its score does not
    depend on has zeros."""
    found = torch.autograd.grad(scores.sum(), list(leaves), allow_unused=True)
    grads = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, found, strict=True)]
    return [grad.float().cpu().numpy() for grad in grads]


def differentiable(processor: Any, setting: str) -> Callable[[Tensor], Tensor]:
    """Returns a function that does with gradient what an image processor does to pictures of one size. It takes pixels
    (3, H, W) from 0 to 1. Raises ValueError for a filter that has no gradient here."""
    mode = mode_of(processor, setting)
    mean, std = (torch.tensor(getattr(processor, name)).reshape(3, 1, 1) for name in ("image_mean", "image_std"))

    def read(pixels: Tensor) -> Tensor:
        if processor.do_resize:
            pixels = resized(pixels, _target(pixels, processor.size), mode)
        if getattr(processor, "do_center_crop", False):
            pixels = _cropped(pixels, int(processor.crop_size["height"]), int(processor.crop_size["width"]))
        if processor.do_normalize:
            pixels = (pixels - mean.to(pixels)) / std.to(pixels)
        return pixels

    return read


def mode_of(processor: Any, setting: str) -> str:
    """torch's mode of the processor's filter. Raises ValueError for one without a gradient here."""
    mode = _MODES.get(int(processor.resample))
    if mode is None or not processor.do_rescale or abs(processor.rescale_factor * 255 - 1) > 1e-6:
        raise ValueError(
            f"settings.{setting}: its image processor resizes by another filter than bilinear or bicubic, or does not "
            "scale pixels by 1 / 255, so that it has no gradient here"
        )
    return mode


def resized(pixels: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """(3, *size) of (3, H, W), from 0 to 1 as PIL clips its result."""
    if tuple(pixels.shape[1:]) == size:
        return pixels
    scaled: Tensor = interpolate(pixels[None], size=size, mode=mode, antialias=True, align_corners=False)[0]
    return scaled.clamp(0, 1)


def _target(pixels: Tensor, size: Any) -> tuple[int, int]:
    """Height and width that the processor resizes to."""
    height, width = pixels.shape[1:]
    shortest = size.get("shortest_edge")
    if shortest is None:
        return int(size["height"]), int(size["width"])
    short, long = sorted((height, width))
    scaled = int(shortest * long / short)
    return (shortest, scaled) if height <= width else (scaled, shortest)


def _cropped(pixels: Tensor, height: int, width: int) -> Tensor:
    """The middle, as transformers cuts it; what is missing is black."""
    above, left = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
    if min(above, left) >= 0:
        return pixels[:, above : above + height, left : left + width]
    full = pixels.new_zeros(3, max(height, pixels.shape[1]), max(width, pixels.shape[2]))
    top, start = (full.shape[1] - pixels.shape[1] + 1) // 2, (full.shape[2] - pixels.shape[2] + 1) // 2
    full[:, top : top + pixels.shape[1], start : start + pixels.shape[2]] = pixels
    return _cropped(full, height, width)
