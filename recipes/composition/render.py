"""Paint scenes: background, things with their shadows, and signs, many pictures at once on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from recipes.composition.backgrounds import grid, paint_backgrounds
from recipes.composition.palette import tints
from recipes.composition.signs import paint_signs
from recipes.composition.world import MAX_THINGS, World

if TYPE_CHECKING:
    from recipes.composition.scenes import Scenes

SHADOW = 0.30
"""How much darker the ground is under a thing."""
LEAST_CONTRAST = 0.12
"""Difference in luminance, at least, that the whole way from a color's middle to its dark or light takes."""
DROP = 0.018
"""How far down a shadow falls, a share of the edge."""


@torch.no_grad()
def render(world: World, scenes: Scenes, device: torch.device | str) -> torch.Tensor:
    """(N, 3, S, S) float32 from 0 to 1 of scenes that are on any device, computed on `device`."""
    scenes = scenes.to(device)
    canvas = paint_backgrounds(scenes, world.size)
    layers = [_things(world, scenes, slot) for slot in range(MAX_THINGS)]
    canvas = _shade(canvas, layers)
    for rows, layer in layers:
        canvas[rows] = canvas[rows] * (1 - layer[:, 3:]) + layer[:, :3]
    return paint_signs(world, scenes, canvas).clamp_(0, 1)


@torch.no_grad()
def coverage(world: World, scenes: Scenes) -> torch.Tensor:
    """(N, 4, S, S) float32 on the scenes' device: how much of each pixel each thing covers."""
    cover = torch.zeros(len(scenes), MAX_THINGS, world.size, world.size, device=scenes.device)
    for slot in range(MAX_THINGS):
        rows, layer = _things(world, scenes, slot)
        cover[rows, slot] = layer[:, 3]
    return cover


def _things(world: World, scenes: Scenes, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that have a thing in this slot, and it on an empty canvas: (rows, 4, S, S), multiplied by alpha."""
    rows = torch.nonzero(scenes.nouns[:, slot] >= 0).squeeze(1)
    sprites = _tinted(world, scenes, rows, slot)
    angle, size = scenes.angles[rows, slot], scenes.sizes[rows, slot]
    offset = grid(world.size, scenes.device) - scenes.centers[rows, slot][:, None, None]
    cos, sin = (f(angle)[:, None, None] for f in (torch.cos, torch.sin))
    across = offset[..., 0] * cos + offset[..., 1] * sin
    down = offset[..., 1] * cos - offset[..., 0] * sin
    across = torch.where(scenes.flips[rows, slot][:, None, None], -across, across)
    points = torch.stack([across, down], -1) * (2 / size)[:, None, None, None]
    return rows, F.grid_sample(sprites, points, mode="bilinear", padding_mode="zeros", align_corners=False)


def _tinted(world: World, scenes: Scenes, rows: torch.Tensor, slot: int) -> torch.Tensor:
    """(rows, 4, E, E) sprites in the colors of the scenes. A thing's median luminance becomes the middle of a color,
    what is darker or lighter goes towards its dark or its light."""
    device = scenes.device
    at = scenes.nouns[rows, slot] * len(world.styles) + scenes.styles[rows, slot]
    sprites = world.sprites(device)[at].float() / 255
    color = scenes.colors[rows, slot]
    tinted = torch.nonzero(color >= 0).squeeze(1)
    part = sprites[tinted]
    alpha = part[:, 3:]
    weights = torch.tensor([0.299, 0.587, 0.114], device=device)[:, None, None]
    luminance = (part[:, :3] * weights).sum(1, keepdim=True) / alpha.clamp(min=1 / 255)
    low, median, high = world.atlas.brightness.to(device)[at[tinted]][..., None, None, None].unbind(1)
    darker = (median - luminance) / (median - low).clamp(min=LEAST_CONTRAST)
    lighter = (luminance - median) / (high - median).clamp(min=LEAST_CONTRAST)
    dark, middle, light = tints(world.colors, device)[color[tinted]][..., None, None].unbind(1)
    shade = middle + (dark - middle) * darker.clamp(0, 1) + (light - middle) * lighter.clamp(0, 1)
    return sprites.index_copy(0, tinted, torch.cat([shade * alpha, alpha], 1))


def _shade(canvas: torch.Tensor, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The canvas with soft shadows below all things."""
    edge = canvas.shape[-1]
    cover = canvas.new_zeros(len(canvas), 1, edge, edge)
    for rows, layer in layers:
        cover[rows] = torch.maximum(cover[rows], layer[:, 3:])
    wide = 2 * round(edge / 48) + 1
    drop = round(DROP * edge)
    blurred = F.avg_pool2d(F.avg_pool2d(cover, wide, 1, wide // 2), wide, 1, wide // 2)
    fallen = F.pad(blurred, (0, 0, drop, 0))[..., :edge, :]
    return canvas * (1 - SHADOW * fallen)
