"""Clips: what the tiny model is asked to film, and the rendered clips it learned from.

A clip shows one flat shape that crosses a dark ground in one direction. A `Clip` says what a prompt can say; where the
shape starts, its exact speed and shade are drawn again for each film. Of every color and shape one direction is held
out: no film of it is ever shown and no caption names it while the base model or a policy learns.

All is vectorized torch, so that a device renders films as fast as it learns from them.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EDGE = 32
"""Height and width in pixels."""

NUM_FRAMES = 9
"""Three latent frames."""

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (215, 60, 55),
    "green": (70, 180, 90),
    "blue": (80, 115, 235),
    "yellow": (240, 210, 70),
    "orange": (240, 140, 45),
    "purple": (165, 85, 205),
    "cyan": (80, 205, 215),
    "white": (235, 235, 235),
}
SHAPES = ("ball", "square", "triangle", "diamond")
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""To unit vectors in pixels, x to the right and y down."""

RADII: dict[str, tuple[float, float]] = {"": (3.2, 5.4), "small": (3.2, 3.8), "large": (4.8, 5.4)}
"""Word for a size ("" for none) to least and greatest radius in pixels."""

TRAVEL = (10.0, 14.0)
"""Least and greatest distance in pixels from the first frame to the last."""

GROUND = (18, 44)
JITTER = 14.0
RENDER_BATCH = 1024


@dataclass(frozen=True)
class Clip:
    """The content that a prompt asks for: keys of `COLORS`, `DIRECTIONS` and `RADII`, and one of `SHAPES`."""

    color: str
    shape: str
    direction: str
    size: str = ""

    @property
    def prompt(self) -> str:
        """The sentence that asks for it; its only word for a direction is the last."""
        return " ".join(word for word in ("A", self.size, self.color, self.shape, "moving", self.direction) if word)

    @property
    def held_out(self) -> bool:
        """Tells whether its color, shape and direction are never trained on together."""
        numbers = [list(names).index(name) for names, name in zip(_TRIPLE, self._triple, strict=True)]
        return (numbers[0] + numbers[1]) % len(DIRECTIONS) == numbers[2]

    @property
    def _triple(self) -> tuple[str, str, str]:
        return self.color, self.shape, self.direction


_TRIPLE: tuple[Iterable[str], ...] = (COLORS, SHAPES, DIRECTIONS)
ALL_CLIPS = [Clip(*parts) for parts in itertools.product(COLORS, SHAPES, DIRECTIONS, RADII)]
TRAIN_CLIPS = [clip for clip in ALL_CLIPS if not clip.held_out]
HELD_OUT_CLIPS = [clip for clip in ALL_CLIPS if clip.held_out]


@dataclass(frozen=True)
class Films:
    """`pixels` (N, 9, 32, 32, 3) uint8, and for each the index of its caption among `TRAIN_CLIPS`, (N,) int64."""

    pixels: Tensor
    captions: Tensor


def draw_films(num: int, wrong_share: float, seed: int, device: torch.device | str = "cpu") -> Films:
    """`num` films of random `TRAIN_CLIPS`; with probability `wrong_share` the caption names another direction."""
    generator = torch.Generator().manual_seed(seed)
    shown = torch.randint(len(TRAIN_CLIPS), (num,), generator=generator)
    wrong = torch.rand(num, generator=generator) < wrong_share
    others = torch.tensor(_other_directions())
    choice = torch.randint(others.shape[1], (num,), generator=generator)
    captions = torch.where(wrong, others[shown, choice], shown)
    parts = torch.split(shown, RENDER_BATCH)
    pixels = [render([TRAIN_CLIPS[index] for index in part.tolist()], generator, device) for part in parts]
    return Films(torch.cat(pixels), captions.to(device))


def _other_directions() -> list[list[int]]:
    """Indices of the clips that differ only in direction, for each of `TRAIN_CLIPS`."""
    alike: dict[tuple[str, str, str], list[int]] = {}
    for index, clip in enumerate(TRAIN_CLIPS):
        alike.setdefault((clip.color, clip.shape, clip.size), []).append(index)
    return [
        [other for other in alike[clip.color, clip.shape, clip.size] if other != index]
        for index, clip in enumerate(TRAIN_CLIPS)
    ]


def render(clips: Sequence[Clip], generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """Films (N, 9, 32, 32, 3) uint8 on `device`; all that is random comes from the CPU `generator`."""
    num = len(clips)

    def uniform(low: Tensor | float, high: Tensor | float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(num, *shape, generator=generator)

    radii = torch.tensor([RADII[clip.size] for clip in clips])
    radius = uniform(radii[:, 0], radii[:, 1])
    velocity = torch.tensor([DIRECTIONS[clip.direction] for clip in clips]) * uniform(*TRAVEL, 1)
    reach = radius[:, None] + 1 + velocity.abs() / 2
    middle = reach + (EDGE - 1 - 2 * reach) * torch.rand(num, 2, generator=generator)
    center = middle[:, None] + velocity[:, None] * torch.linspace(-0.5, 0.5, NUM_FRAMES)[:, None]
    color = torch.tensor([COLORS[clip.color] for clip in clips]) + uniform(-JITTER, JITTER, 3)
    ground = uniform(*GROUND, 1).expand(-1, 3)
    shape = torch.tensor([SHAPES.index(clip.shape) for clip in clips])
    cover = _coverage(shape.to(device), center.to(device), radius.to(device))[..., None]
    color, ground = (part.to(device)[:, None, None, None] for part in (color, ground))
    return torch.lerp(ground, color, cover).round().clamp(0, 255).to(torch.uint8)


def _coverage(shape: Tensor, center: Tensor, radius: Tensor) -> Tensor:
    """How much of each pixel the shape covers, (N, 9, 32, 32) in 0 … 1, from its distance to the shape's edge."""
    grid = torch.arange(EDGE, device=center.device)
    x = grid[None, None, None, :] - center[:, :, 0, None, None]
    y = grid[None, None, :, None] - center[:, :, 1, None, None]
    r = radius[:, None, None, None]
    slope = math.sqrt(3) / 2
    distances = {
        "ball": torch.hypot(x, y) - r,
        "square": torch.maximum(x.abs(), y.abs()) - 0.87 * r,
        "triangle": torch.maximum(slope * x.abs() - y / 2, y) - 0.62 * r,
        "diamond": (x.abs() + y.abs()) / math.sqrt(2) - 0.87 * r,
    }
    every = torch.stack([distances[name] for name in SHAPES], 1)
    return (0.5 - every[torch.arange(len(shape), device=shape.device), shape]).clamp(0, 1)
