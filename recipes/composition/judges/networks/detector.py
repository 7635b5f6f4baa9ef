"""The reward's network: a heat map of centers for every noun, boxes, styles, and a reader of words.

A small convolutional network looks at the picture in 16×16 cells. As in CenterNet (arXiv 1904.07850) the peaks of a
noun's map are its things, and the cell says how far the box reaches to each side. The reader gets the box of the sign
scaled to `LINE`, and names the letter in the middle of which a frame of four columns is, or none.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

CELLS = 16
"""Cells along an edge."""
LINE = (24, 128)
"""Rows and columns of what the reader sees."""
FRAMES = LINE[1] // 4
NUM_LETTERS = 26
BLANK = 0


class Block(nn.Module):
    """Two convolutions around which the input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(_conv(width, width), _conv(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.layers(x)
        return result


class Detector(nn.Module):
    """Network for pictures of `size` pixels, a power of two from 64 up."""

    def __init__(self, size: int, num_nouns: int, num_styles: int, width: int) -> None:
        super().__init__()
        steps = (size // CELLS).bit_length() - 1
        widths = [max(16, width >> (steps - step)) for step in range(steps + 1)]
        down: list[nn.Module] = [_conv(3, widths[0])]
        for before, after in pairwise(widths):
            down += [_conv(before, after, 2), Block(after)]
        self.near = nn.Sequential(*down, Block(width))
        self.far = nn.Sequential(_conv(width, 2 * width, 2), Block(2 * width), Block(2 * width))
        self.join = nn.Conv2d(2 * width, width, 1)
        self.merge = nn.Sequential(Block(width), _conv(width, width))
        self.heat = nn.Conv2d(width, num_nouns + 1, 1)
        self.reach = nn.Conv2d(width, 4, 1)
        self.style = nn.Linear(3 * width, num_styles)
        assert self.heat.bias is not None
        nn.init.constant_(self.heat.bias, -4.6)  # a sigmoid of 0.01: almost all cells are empty

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Takes pictures (N, 3, S, S) from 0 to 1. Returns logits of centers (N, nouns + 1, C, C), the sign last;
        logs of how far boxes reach left, up, right and down of a cell's middle, in edges (N, 4, C, C); logits of styles
        (N, styles)."""
        near = self.near(2 * pictures - 1)
        far = self.far(near)
        joined = self.merge(near + F.interpolate(self.join(far), scale_factor=2.0, mode="nearest"))
        seen = torch.cat([joined.amax((2, 3)), far.mean((2, 3))], 1)
        return self.heat(joined), self.reach(joined), self.style(seen)


class Reader(nn.Module):
    """Spells a line."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _conv(3, width, 2),
            Block(width),
            _conv(width, 2 * width, 2),
            Block(2 * width),
            nn.Conv2d(2 * width, 2 * width, (LINE[0] // 4, 1)),
            nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, (1, 3), padding=(0, 1)),
            nn.ReLU(),
            nn.Conv2d(2 * width, NUM_LETTERS + 1, 1),
        )

    def forward(self, lines: torch.Tensor) -> torch.Tensor:
        """Logits (N, FRAMES, 27) of the blank and A–Z for lines (N, 3, *LINE) from 0 to 1."""
        logits: torch.Tensor = self.layers(2 * lines - 1)
        return logits.squeeze(2).transpose(1, 2)


def cut_lines(pictures: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """(N, 3, *LINE): the boxes (N, 4), in edges, of pictures (N, 3, S, S)."""
    middles, halves = boxes[:, :2] + boxes[:, 2:] - 1, boxes[:, 2:] - boxes[:, :2]
    matrix = torch.cat([torch.diag_embed(halves), middles[..., None]], 2)
    points = F.affine_grid(matrix, [len(boxes), 3, *LINE], align_corners=False)
    return F.grid_sample(pictures, points, mode="bilinear", padding_mode="border", align_corners=False)


def spell_out(logits: torch.Tensor) -> list[str]:
    """What each line says: every run of frames that are not blank is a letter, the one of most probability in all."""
    shares = logits.softmax(-1)
    is_letter = shares.argmax(-1) != BLANK
    begins = is_letter & ~F.pad(is_letter, (1, 0))[:, :-1]
    run = (begins.cumsum(1) - 1).clamp(min=0)
    sums = torch.zeros_like(shares).scatter_add(1, run[..., None].expand_as(shares), shares * is_letter[..., None])
    letters = sums[..., 1:].argmax(-1).tolist()
    counts = begins.sum(1).tolist()
    return ["".join(chr(65 + letter) for letter in row[:count]) for row, count in zip(letters, counts, strict=True)]


def _conv(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
    )
