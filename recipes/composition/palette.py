"""Colors: how a thing is tinted, and what backgrounds and signs are painted with."""

from __future__ import annotations

from typing import Final

import torch

TINTS: Final[dict[str, tuple[tuple[float, float, float], ...]]] = {
    "red": ((0.46, 0.02, 0.04), (0.86, 0.11, 0.12), (1.0, 0.52, 0.47)),
    "orange": ((0.66, 0.27, 0.01), (0.97, 0.50, 0.05), (1.0, 0.74, 0.36)),
    "yellow": ((0.70, 0.52, 0.02), (0.98, 0.84, 0.12), (1.0, 0.96, 0.62)),
    "green": ((0.03, 0.30, 0.09), (0.18, 0.63, 0.24), (0.60, 0.90, 0.55)),
    "blue": ((0.04, 0.11, 0.46), (0.15, 0.36, 0.87), (0.55, 0.75, 1.0)),
    "purple": ((0.24, 0.07, 0.38), (0.52, 0.21, 0.72), (0.79, 0.58, 0.95)),
    "pink": ((0.74, 0.26, 0.48), (0.97, 0.54, 0.74), (1.0, 0.84, 0.91)),
    "brown": ((0.21, 0.10, 0.04), (0.46, 0.26, 0.12), (0.70, 0.49, 0.31)),
    "black": ((0.01, 0.01, 0.02), (0.11, 0.11, 0.13), (0.36, 0.36, 0.40)),
    "white": ((0.66, 0.67, 0.71), (0.93, 0.93, 0.95), (1.0, 1.0, 1.0)),
}
"""What the darkest, the middle and the lightest part of a thing of that color become."""
BOARDS: Final = (
    (0.97, 0.95, 0.90),
    (0.98, 0.82, 0.24),
    (0.16, 0.47, 0.30),
    (0.15, 0.30, 0.62),
    (0.74, 0.18, 0.17),
    (0.13, 0.13, 0.15),
)
"""Colors of signs; letters are dark on light boards and light on dark ones."""


def tints(colors: tuple[str, ...], device: torch.device) -> torch.Tensor:
    """(colors, 3, 3) float32: dark, middle and light of each color."""
    return torch.tensor([TINTS[color] for color in colors], device=device)


def pastel(hue: torch.Tensor, lightness: torch.Tensor, chroma: torch.Tensor) -> torch.Tensor:
    """(…, 3) colors of a hue (turns), around a lightness, as far from gray as `chroma`."""
    phases = torch.tensor([0.0, 1 / 3, 2 / 3], device=hue.device)
    wave = torch.cos(2 * torch.pi * (hue[..., None] - phases))
    return (lightness[..., None] + chroma[..., None] * wave).clamp(0, 1)
