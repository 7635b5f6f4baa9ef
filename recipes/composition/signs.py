"""Signs: a board on a post with a word in one of the atlas's fonts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from recipes.composition.backgrounds import NUM_USED, grid
from recipes.composition.palette import BOARDS
from recipes.composition.world import World

if TYPE_CHECKING:
    from recipes.composition.scenes import Scenes

WOOD = (0.45, 0.32, 0.20)
POST = 0.035
"""Half of the post's width."""
CORNER, FRAME = 0.035, 0.022
LETTER_SHARE = 0.86
"""Share of the board's width that a word may fill."""
DARK, LIGHT = 0.08, 0.97


def paint_signs(world: World, scenes: Scenes, canvas: torch.Tensor) -> torch.Tensor:
    """The canvas (N, 3, S, S) with the signs of the scenes that have one."""
    rows = torch.nonzero(scenes.word[:, 0] >= 0).squeeze(1)
    if not len(rows):
        return canvas
    part, size, device = scenes.pick(rows), world.size, scenes.device
    look = part.look[:, NUM_USED:]
    x, y = grid(size, device).unbind(-1)
    left, top, right, bottom = (side[:, None, None] for side in part.sign.unbind(1))
    center_x, center_y = (left + right) / 2, (top + bottom) / 2
    board = torch.tensor(BOARDS, device=device)[(look[:, 0] * len(BOARDS)).long()]
    board = (board + 0.06 * (look[:, 1:4] - 0.5)).clamp(0, 1)
    ink = torch.where(board.mean(1) > 0.5, DARK, LIGHT)[:, None, None, None]
    painted = canvas[rows]

    post = (((x - center_x).abs() < POST) & (y > center_y)).float()[:, None]
    wood = torch.tensor(WOOD, device=device)[:, None, None] * (1 - 1.2 * (x - center_x)[:, None])
    painted = painted * (1 - post) + wood.clamp(0, 1) * post
    across = (x - center_x).abs() - (right - left) / 2 + CORNER
    down = (y - center_y).abs() - (bottom - top) / 2 + CORNER
    outside = torch.sqrt(across.clamp(min=0) ** 2 + down.clamp(min=0) ** 2)
    outside = outside + torch.maximum(across, down).clamp(max=0) - CORNER
    shadow = (0.5 - (outside - 0.012) * size / 3).clamp(0, 1)[:, None]
    painted = painted * (1 - 0.22 * shadow)
    cover = (0.5 - outside * size).clamp(0, 1)[:, None]
    painted = painted * (1 - cover) + board[..., None, None] * cover
    frame = (0.5 - ((outside + FRAME).abs() - 0.006) * size).clamp(0, 1)[:, None]
    painted = painted * (1 - frame) + ink * frame
    covered = _letters(world, part)[:, None]
    canvas[rows] = painted * (1 - covered) + ink * covered
    return canvas


@dataclass(frozen=True, eq=False)
class Lettering:
    """Where the letters of signs are, in shares of the picture's edge."""

    font: torch.Tensor
    """(N,) int64."""
    height: torch.Tensor
    """(N,)."""
    middles: torch.Tensor
    """(N, 4): x of each letter's middle."""
    middle_y: torch.Tensor
    """(N,)."""
    widths: torch.Tensor
    """(N, 4): widths with the space around; 0 where the word has ended."""


def lettering(world: World, scenes: Scenes) -> Lettering:
    """Lettering of scenes with signs. Words fill their boards but for a margin that varies."""
    look = scenes.look[:, NUM_USED:]
    glyphs, advances = world.glyphs(scenes.device)
    font = (look[:, 4] * len(glyphs)).long()
    widths = torch.where(scenes.word >= 0, advances[font[:, None], scenes.word.clamp(min=0)], 0.0)
    left, top, right, bottom = scenes.sign.unbind(1)
    room_x, room_y = LETTER_SHARE * (right - left) - 2 * FRAME, (bottom - top) - 2 * FRAME - 0.08
    height = torch.minimum(room_x / widths.sum(1), room_y) * (0.88 + 0.12 * look[:, 5])
    widths = widths * height[:, None]
    middles = ((left + right) / 2 - widths.sum(1) / 2)[:, None] + widths.cumsum(1) - widths / 2
    spare = (bottom - top - 2 * FRAME - height).clamp(min=0) * 0.5
    return Lettering(font, height, middles, (top + bottom) / 2 + spare * (look[:, 6] - 0.5), widths)


def _letters(world: World, scenes: Scenes) -> torch.Tensor:
    """(N, S, S): how much of each pixel the word covers."""
    at = lettering(world, scenes)
    glyphs, _ = world.glyphs(scenes.device)
    points = grid(world.size, scenes.device)
    covered = torch.zeros(len(scenes), world.size, world.size, device=scenes.device)
    for place in range(scenes.word.shape[1]):
        center = torch.stack([at.middles[:, place], at.middle_y], 1)[:, None, None]
        offset = (points - center) * (2 / at.height)[:, None, None, None]
        letter = scenes.word[:, place]
        picture = glyphs[at.font, letter.clamp(min=0)][:, None]
        drawn = F.grid_sample(picture, offset, mode="bilinear", padding_mode="zeros", align_corners=False)[:, 0]
        covered = torch.maximum(covered, drawn * (letter >= 0)[:, None, None])
    return covered
