"""The color of a thing by its pixels: each votes by how much likelier it is in things of a color than in backgrounds.

The table is counted from renders: how often each of 16³ shades occurs in things of each color, and outside of things.
A thing's color is the one with the largest sum over its box of max(0, log p(shade | color) − log p(shade | ground)).
"""

from __future__ import annotations

import torch

from recipes.composition.render import coverage, render
from recipes.composition.scenes import World, draw

BINS = 16
SMOOTHING = 0.5
"""Pixels added to each shade of each color, so that none is impossible."""
LEAST_COVER = 0.95
"""Cover from which a pixel is a thing's own."""


def count_shades(world: World, num_scenes: int, generator: torch.Generator) -> torch.Tensor:
    """(colors, BINS³) float32: the gain of each shade for each color, never below 0."""
    num_colors = len(world.colors)
    counts = torch.full((num_colors + 1, BINS**3), SMOOTHING, dtype=torch.float64, device=generator.device)
    for _ in range(0, num_scenes, 128):
        scenes = draw(world, 128, generator, split="any", categories=["colors", "color_attr"])
        pictures = render(world, scenes, generator.device)
        cover = coverage(world, scenes)
        shades = shade_of(pictures)
        owner = torch.where(cover.amax(1) < 1 - LEAST_COVER, num_colors, -1)
        for slot in range(cover.shape[1]):
            inside = cover[:, slot] > LEAST_COVER
            owner = torch.where(inside, scenes.colors[:, slot, None, None], owner)
        kept = owner >= 0
        flat = owner[kept] * BINS**3 + shades[kept]
        counts += torch.bincount(flat, minlength=counts.numel()).view_as(counts)
    likely = (counts / counts.sum(1, keepdim=True)).log()
    return (likely[:num_colors] - likely[num_colors:]).clamp(min=0).float()


def shade_of(pictures: torch.Tensor) -> torch.Tensor:
    """(N, S, S) int64 of pictures (N, 3, S, S) from 0 to 1."""
    levels = (pictures * BINS).long().clamp(0, BINS - 1)
    return (levels[:, 0] * BINS + levels[:, 1]) * BINS + levels[:, 2]


def vote(gains: torch.Tensor, shades: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """(B,) int64: the color of the thing in each box, −1 where no pixel speaks for any. shades (B, S, S) of its
    picture; boxes (B, 4) in pixels."""
    at = torch.arange(shades.shape[-1], device=shades.device) + 0.5
    left, top, right, bottom = (side[:, None] for side in boxes.unbind(1))
    across, down = (at > left) & (at < right), (at > top) & (at < bottom)
    inside = (down[:, :, None] & across[:, None, :]).flatten(1)
    votes = torch.stack([(row[shades.flatten(1)] * inside).sum(1) for row in gains], 1)
    return torch.where(votes.amax(1) > 0, votes.argmax(1), -1)
