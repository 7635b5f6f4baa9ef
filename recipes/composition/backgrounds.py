"""Backgrounds: pale colors that change over the picture, a horizon, stripes or dots, and small clutter.

They take the first `NUM_USED` of a scene's random numbers. All are grayer and of narrower range than things are, so
that the color of a thing is never in doubt.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from recipes.composition.palette import pastel

if TYPE_CHECKING:
    from recipes.composition.scenes import Scenes

NUM_CLUTTER = 7
PER_CLUTTER = 5
FIRST_CLUTTER = 12
NUM_USED = FIRST_CLUTTER + NUM_CLUTTER * PER_CLUTTER


@lru_cache(8)
def grid(size: int, device: torch.device) -> torch.Tensor:
    """(S, S, 2): x and y of the middles of pixels, shares of the edge."""
    at = (torch.arange(size, device=device, dtype=torch.float32) + 0.5) / size
    y, x = torch.meshgrid(at, at, indexing="ij")
    return torch.stack([x, y], -1)


def paint_backgrounds(scenes: Scenes, size: int) -> torch.Tensor:
    """(N, 3, S, S): what is behind the things."""
    look = scenes.look
    x, y = grid(size, scenes.device).unbind(-1)
    angle = 2 * torch.pi * look[:, 0, None, None]
    along = (x - 0.5) * angle.cos() + (y - 0.5) * angle.sin()
    kind = (look[:, 1, None, None] * 5).floor()
    pattern = torch.where(kind == 0, along / 1.5 + 0.5, _horizon(look, x, y, size))
    pattern = torch.where(kind == 2, _stripes(look, along, size), pattern)
    pattern = torch.where(kind == 3, _dots(look, x, y, size), pattern)
    pattern = torch.where(kind == 4, _waves(look, x, y), pattern)
    lightness = 0.54 + 0.24 * look[:, 3]
    chroma = 0.02 + 0.09 * look[:, 4]
    step = (0.05 + 0.09 * look[:, 5]) * torch.where(look[:, 6] < 0.5, -1.0, 1.0)
    one = pastel(look[:, 2], lightness, chroma)[..., None, None]
    other = pastel(look[:, 2] + 0.5 * (look[:, 7] - 0.5), lightness + step, chroma)[..., None, None]
    canvas = one + (other - one) * pattern[:, None]
    return _strew(canvas, look, x, y, size)


def _horizon(look: torch.Tensor, x: torch.Tensor, y: torch.Tensor, size: int) -> torch.Tensor:
    """0 above a slightly bent line, 1 below."""
    line = 0.45 + 0.4 * look[:, 8, None] + 0.05 * torch.sin(2 * torch.pi * (x[:1] + look[:, 9, None]))
    return ((y - line[:, None]) * size).clamp(-0.5, 0.5) + 0.5


def _stripes(look: torch.Tensor, along: torch.Tensor, size: int) -> torch.Tensor:
    number = (3 + 6 * look[:, 8])[:, None, None]
    return (torch.sin(2 * torch.pi * number * along) * size / number / 6).clamp(-0.5, 0.5) + 0.5


def _dots(look: torch.Tensor, x: torch.Tensor, y: torch.Tensor, size: int) -> torch.Tensor:
    number = (4 + 4 * look[:, 8]).round()[:, None, None]
    across, down = (x * number) % 1 - 0.5, (y * number) % 1 - 0.5
    return ((0.22 - torch.sqrt(across**2 + down**2)) * size / number).clamp(-0.5, 0.5) + 0.5


def _waves(look: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b, c, d = (6 * look[:, place, None, None] for place in (8, 9, 10, 11))
    return 0.5 + 0.25 * (torch.sin(a + (3 + b) * x + 2 * y) + torch.sin(c + (3 + d) * y - 3 * x))


def _strew(canvas: torch.Tensor, look: torch.Tensor, x: torch.Tensor, y: torch.Tensor, size: int) -> torch.Tensor:
    """The canvas with up to `NUM_CLUTTER` small disks, rings and bars a little lighter or darker than it."""
    clutter = look[:, FIRST_CLUTTER:NUM_USED].view(-1, NUM_CLUTTER, PER_CLUTTER)
    shown = torch.arange(NUM_CLUTTER, device=look.device) < (look[:, 10, None] * (NUM_CLUTTER + 1)).floor()
    for place in range(NUM_CLUTTER):
        left, top, radius, turn, tone = (number[:, None, None] for number in clutter[:, place].unbind(-1))
        radius = 0.012 + 0.028 * radius
        across, down = x - left, y - top
        angle = torch.pi * turn
        bar_x, bar_y = across * angle.cos() + down * angle.sin(), down * angle.cos() - across * angle.sin()
        disk = torch.sqrt(across**2 + down**2) - radius
        bar = torch.maximum(bar_x.abs() - 1.8 * radius, bar_y.abs() - 0.4 * radius)
        kind = (turn * 30) % 3
        outside = torch.where(kind < 1, disk, torch.where(kind < 2, disk.abs() - 0.3 * radius, bar))
        cover = (0.5 - outside * size).clamp(0, 1) * shown[:, place, None, None]
        strength = 0.10 * torch.where(tone < 0.5, -1.0, 1.0) + 0.12 * (tone - 0.5)
        canvas = canvas + (cover * strength)[:, None]
    return canvas.clamp(0.25, 0.97)
