"""Where things are: sizes, turns and places at which no box touches another and every relation holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from recipes.composition.atlas import NUM_DIRECTIONS
from recipes.composition.world import MAX_THINGS, World

if TYPE_CHECKING:
    from recipes.composition.scenes import Scenes

SIZES = torch.tensor([[0.0, 0.0], [0.46, 0.74], [0.32, 0.48], [0.30, 0.38], [0.27, 0.35]])
"""Least and largest size of a sprite, by how many things there are."""
MAX_TURN = 0.22
"""Largest turn to either side, radians."""
MARGIN = 0.02
"""Least distance of a box from the picture's edge."""
GAP = 0.025
"""Least distance of boxes from each other, on one axis."""
POSITION_THRESHOLD = 0.1
"""GenEval's: share of both sizes by which an offset is shortened."""
CLEAR, UNCLEAR = 0.62, 0.35
"""A relation holds clearly where the share of the shortened offset along its axis (GenEval asks for 0.5) is above the
first and that across it is below the second."""
NUM_CANDIDATES = 48
SHRINK = 0.95
"""Factor on the sizes of a scene of whose candidates none fits."""


@dataclass(frozen=True, eq=False)
class Placed:
    """Places as `Scenes` has them."""

    boxes: torch.Tensor
    centers: torch.Tensor
    sizes: torch.Tensor
    angles: torch.Tensor
    flips: torch.Tensor


def place(world: World, scenes: Scenes, generator: torch.Generator) -> Placed:
    """Sizes, turns and places of all things. Of `NUM_CANDIDATES` random arrangements the first that fits is taken;
    where none does, things shrink and the search is repeated."""
    n, device = len(scenes), scenes.device
    numbers = torch.rand(4, n, MAX_THINGS, generator=generator, device=device)
    bounds = SIZES.to(device)[scenes.count]
    base = bounds[:, :1] + (bounds[:, 1:] - bounds[:, :1]) * numbers[0]
    alike = base[:, :1] * (0.94 + 0.12 * numbers[0])
    same = (scenes.nouns[:, 0] == scenes.nouns[:, 1]) & (scenes.count > 1)
    shown = scenes.nouns >= 0
    sizes = torch.where(same[:, None], alike, base) * shown
    angles = (2 * numbers[1] - 1) * MAX_TURN
    flips = numbers[2] < 0.5
    reach = _reach(world, scenes, angles, flips)
    centers = torch.zeros(n, MAX_THINGS, 2, device=device)
    for number in range(1, MAX_THINGS + 1):
        _search(
            torch.nonzero(scenes.count == number).squeeze(1), number, scenes.relation, reach, sizes, centers, generator
        )
    boxes = _boxes(centers, reach * sizes[..., None]) * shown[..., None]
    return Placed(boxes, centers * shown[..., None], sizes, angles * shown, flips & shown)


def _search(
    todo: torch.Tensor,
    number: int,
    relation: torch.Tensor,
    reach: torch.Tensor,
    sizes: torch.Tensor,
    centers: torch.Tensor,
    generator: torch.Generator,
) -> None:
    """Fill `centers`, and shrink `sizes`, of the scenes `todo`, which have so many things."""
    candidates = NUM_CANDIDATES if number > 1 else 1
    while len(todo):
        reached = reach[todo, :number] * sizes[todo, :number, None]
        spots = torch.rand(len(todo), candidates, number, 2, generator=generator, device=todo.device)
        low, high = MARGIN + reached[:, None, :, :2], 1 - MARGIN - reached[:, None, :, 2:]
        found = low + (high - low).clamp(min=0) * spots
        boxes = _boxes(found, reached[:, None])
        fits = _are_apart(boxes)
        if number == 2:
            fits &= _relate(boxes, relation[todo])
        first = fits.float().argmax(1)
        centers[todo, :number] = found[torch.arange(len(todo), device=todo.device), first]
        todo = todo[~fits.any(1)]
        sizes[todo] = sizes[todo] * SHRINK


def place_signs(wanted: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """(N, 4) float32 boxes of signs, zeros where none is wanted."""
    numbers = torch.rand(len(wanted), 4, generator=generator, device=wanted.device)
    width, height = 0.74 + 0.18 * numbers[:, 0], 0.36 + 0.12 * numbers[:, 1]
    left = 0.03 + (0.94 - width) * numbers[:, 2]
    top = 0.08 + (0.72 - height) * numbers[:, 3]
    return torch.stack([left, top, left + width, top + height], 1) * wanted[:, None]


def _reach(world: World, scenes: Scenes, angles: torch.Tensor, flips: torch.Tensor) -> torch.Tensor:
    """(N, 4, 4): how far each thing reaches left, up, right and down of its center, in its own size."""
    table = world.atlas.extents.to(scenes.device)
    sprites = (scenes.nouns * len(world.styles) + scenes.styles).clamp(min=0)
    sides = torch.tensor([torch.pi, -torch.pi / 2, 0.0, torch.pi / 2], device=scenes.device)
    direction = sides - angles[..., None]
    direction = torch.where(flips[..., None], torch.pi - direction, direction)
    at = (direction / (2 * torch.pi) * NUM_DIRECTIONS) % NUM_DIRECTIONS
    before = at.floor().long() % NUM_DIRECTIONS
    share = at - at.floor()
    rows = table[sprites]
    return rows.gather(2, before) * (1 - share) + rows.gather(2, (before + 1) % NUM_DIRECTIONS) * share


def _boxes(centers: torch.Tensor, reached: torch.Tensor) -> torch.Tensor:
    """(…, 4): left, top, right, bottom."""
    return torch.cat([centers - reached[..., :2], centers + reached[..., 2:]], -1)


def _are_apart(boxes: torch.Tensor) -> torch.Tensor:
    """(N, M): whether all of the boxes (N, M, things, 4) are at least `GAP` apart."""
    apart = torch.ones(boxes.shape[:2], dtype=torch.bool, device=boxes.device)
    for i in range(boxes.shape[2]):
        for j in range(i):
            one, other = boxes[..., i, :], boxes[..., j, :]
            gaps = torch.maximum(one[..., :2] - other[..., 2:], other[..., :2] - one[..., 2:]).amax(-1)
            apart &= gaps >= GAP
    return apart


def _relate(boxes: torch.Tensor, relation: torch.Tensor) -> torch.Tensor:
    """(N, M): whether the first box clearly lies to the second as asked; true where nothing is."""
    middles, extents = (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
    offset = middles[..., 0, :] - middles[..., 1, :]
    shorter = (offset.abs() - POSITION_THRESHOLD * (extents[..., 0, :] + extents[..., 1, :])).clamp(min=0)
    share = offset.sign() * shorter / offset.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    is_vertical = (relation >= 2)[:, None]
    along = torch.where(is_vertical, share[..., 1], share[..., 0])
    across = torch.where(is_vertical, share[..., 0], share[..., 1])
    wanted = torch.where(relation % 2 == 0, -1.0, 1.0)[:, None]
    return ((along * wanted > CLEAR) & (across.abs() < UNCLEAR)) | (relation < 0)[:, None]
