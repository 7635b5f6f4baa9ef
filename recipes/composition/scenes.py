"""Scenes: what is in a batch of pictures and where, drawn by rule from a generator.

`draw` chooses what is shown, as `heldout` allows, then places it. `render` paints it. Everything that a picture
depends on is in `Scenes`, so a batch can be drawn once and painted anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from recipes.composition.heldout import is_allowed
from recipes.composition.layout import place, place_signs
from recipes.composition.render import render
from recipes.composition.world import (
    CATEGORIES,
    MAX_THINGS,
    NUM_WORDINGS,
    RELATIONS,
    WORD_LENGTHS,
    Split,
    World,
)

__all__ = ["CATEGORIES", "Scenes", "World", "draw", "render"]

NUM_LOOKS = 64
"""Random numbers of a scene that say how its background and its sign look."""
TINTED_SHARE = 0.25
"""Share of scenes whose caption asks for no color in which things have one."""
MAX_ROUNDS = 400
"""Rounds of drawing again what a split does not allow, before `draw` gives up."""


@dataclass(frozen=True, eq=False)
class Scenes:
    """N scenes. Ids are places in the world's names; −1 stands for none. Positions and sizes are shares of the
    picture's edge, x to the right, y down."""

    category: torch.Tensor
    """(N,) int64: place in `CATEGORIES`."""
    count: torch.Tensor
    """(N,) int64: things shown, 0 … 4; a sign is not one of them."""
    nouns: torch.Tensor
    """(N, 4) int64."""
    styles: torch.Tensor
    """(N, 4) int64: all things of a scene have the same."""
    colors: torch.Tensor
    """(N, 4) int64; −1: the thing's natural colors."""
    relation: torch.Tensor
    """(N,) int64: how the first thing lies to the second, a place in `RELATIONS`; −1 where nothing is asked."""
    word: torch.Tensor
    """(N, 4) int64: letters of the sign's word as places in the alphabet."""
    wording: torch.Tensor
    """(N,) int64: which sentence asks for the scene."""
    boxes: torch.Tensor
    """(N, 4, 4) float32: left, top, right, bottom of what is seen of each thing; zeros where none is."""
    sign: torch.Tensor
    """(N, 4) float32: box of the sign; zeros where there is none."""
    centers: torch.Tensor
    """(N, 4, 2) float32: centers of the sprites."""
    sizes: torch.Tensor
    """(N, 4) float32: edges of the sprites."""
    angles: torch.Tensor
    """(N, 4) float32: turns, radians, from right towards down."""
    flips: torch.Tensor
    """(N, 4) bool: mirrored left to right, before the turn."""
    look: torch.Tensor
    """(N, NUM_LOOKS) float32 below 1."""

    def __len__(self) -> int:
        return len(self.category)

    @property
    def device(self) -> torch.device:
        return self.category.device

    def pick(self, index: torch.Tensor | slice | Sequence[int]) -> Self:
        """The scenes at these places, or where a mask is true."""
        return self._with(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> Self:
        """The same scenes on a device."""
        return self._with(lambda tensor: tensor.to(device))

    @classmethod
    def cat(cls, parts: Sequence[Scenes]) -> Scenes:
        """One batch of several."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})

    def _with(self, change: Any) -> Self:
        return dataclasses.replace(
            self, **{field.name: change(getattr(self, field.name)) for field in dataclasses.fields(self)}
        )


def draw(
    world: World,
    n: int,
    generator: torch.Generator,
    *,
    split: Split = "train",
    categories: Sequence[str] = CATEGORIES,
) -> Scenes:
    """`n` scenes on the generator's device, each of a random one of `categories`.

    "train": no held-out combination and no held-out prompt. "seen": held-out prompts of trained combinations.
    "unseen": prompts whose decisive combination is held out. "any": all scenes, as judges learn them. The same
    generator state gives the same scenes on the same kind of device. Raises ValueError for a split that has no scene
    of a category.
    """
    return _laid_out(world, choose(world, n, generator, split=split, categories=categories), generator)


def choose(
    world: World,
    n: int,
    generator: torch.Generator,
    *,
    split: Split = "train",
    categories: Sequence[str] = CATEGORIES,
) -> Scenes:
    """What `draw` shows, with no places yet: for prompts without pictures."""
    device = generator.device
    chosen = torch.tensor([CATEGORIES.index(name) for name in categories], device=device)
    category = chosen[torch.randint(len(chosen), (n,), generator=generator, device=device)]
    scenes = _specs(world, category, generator)
    todo = torch.nonzero(~is_allowed(world, scenes, split)).squeeze(1)
    for _ in range(MAX_ROUNDS):
        if not len(todo):
            break
        again = _specs(world, category[todo], generator)
        for field in dataclasses.fields(Scenes):
            getattr(scenes, field.name)[todo] = getattr(again, field.name)
        todo = todo[~is_allowed(world, again, split)]
    else:
        names = sorted({CATEGORIES[index] for index in category[todo].tolist()})
        raise ValueError(
            f"split {split!r} of this world has no {', '.join(names)}: take more nouns, or other categories"
        )
    return scenes


def _specs(world: World, category: torch.Tensor, generator: torch.Generator) -> Scenes:
    """Random scenes of these categories, without places."""
    n, device = len(category), generator.device

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, device=device)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def among(*names: str) -> torch.Tensor:
        return torch.isin(category, torch.tensor([CATEGORIES.index(name) for name in names], device=device))

    is_text, counting = among("text"), among("counting")
    count = torch.where(among("two_object", "position", "color_attr"), 2, 1)
    count = torch.where(counting, 2 + integers(MAX_THINGS - 1, n), count)
    count = torch.where(is_text, 0, count)
    shown = torch.arange(MAX_THINGS, device=device) < count[:, None]

    first = integers(len(world.nouns), n)
    second = (first + 1 + integers(len(world.nouns) - 1, n)) % len(world.nouns)
    nouns = torch.where(counting[:, None], first[:, None], torch.stack([first, second, first, first], 1))
    one = integers(len(world.colors), n)
    other = (one + 1 + integers(len(world.colors) - 1, n)) % len(world.colors)
    colors = torch.where(counting[:, None], one[:, None], torch.stack([one, other, one, one], 1))
    colored = among("colors", "color_attr") | ((numbers(n) < TINTED_SHARE) & ~among("style"))
    styles = integers(len(world.styles), n)[:, None].expand(n, MAX_THINGS)
    longest = max(WORD_LENGTHS)
    length = min(WORD_LENGTHS) + integers(longest - min(WORD_LENGTHS) + 1, n)
    spelt = is_text[:, None] & (torch.arange(longest, device=device) < length[:, None])
    zeros = torch.zeros(n, MAX_THINGS, device=device)
    return Scenes(
        category=category.clone(),
        count=count,
        nouns=torch.where(shown, nouns, -1),
        styles=torch.where(shown, styles, -1),
        colors=torch.where(shown & colored[:, None], colors, -1),
        relation=torch.where(among("position"), integers(len(RELATIONS), n), -1),
        word=torch.where(spelt, integers(26, n, longest), -1),
        wording=integers(NUM_WORDINGS, n),
        boxes=torch.zeros(n, MAX_THINGS, 4, device=device),
        sign=zeros.clone(),
        centers=torch.zeros(n, MAX_THINGS, 2, device=device),
        sizes=zeros,
        angles=zeros.clone(),
        flips=torch.zeros(n, MAX_THINGS, dtype=torch.bool, device=device),
        look=numbers(n, NUM_LOOKS),
    )


def _laid_out(world: World, scenes: Scenes, generator: torch.Generator) -> Scenes:
    placed = place(world, scenes, generator)
    sign = place_signs(scenes.category == CATEGORIES.index("text"), generator)
    return dataclasses.replace(
        scenes,
        boxes=placed.boxes,
        centers=placed.centers,
        sizes=placed.sizes,
        angles=placed.angles,
        flips=placed.flips,
        sign=sign,
    )
