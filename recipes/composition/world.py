"""What a world has: things, styles, colors, words, and which of their combinations are held out.

A combination is a pair, such as a noun with a color. The rule hashes names, so that it is the same in every world:
one pair in eight is never shown in training ("unseen"). Of all prompts that have no such pair, one in ten is kept
from training as well ("seen": the prompt is new, its combinations are not).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, Literal, get_args

import torch

from recipes.composition import atlas as atlases
from recipes.composition.atlas import LETTERS, Atlas
from recipes.composition.nouns import Noun, read_nouns
from services.reward.scorers.networks.geneval_rules import COLORS

Split = Literal["train", "seen", "unseen", "any"]
Category = Literal["single_object", "two_object", "counting", "colors", "position", "color_attr", "text", "style"]
CATEGORIES: Final[tuple[str, ...]] = get_args(Category)
"""GenEval's six tags, then two of our own. A scene's category is an index into these."""
RELATIONS: Final = ("left of", "right of", "above", "below")
MAX_THINGS = 4
WORD_LENGTHS: Final = (3, 4)
NUM_WORDINGS: Final = 8
"""Sentences that can ask for the same scene."""
NUM_STYLE_WORDINGS: Final = 4
"""The same for scenes of the category "style"."""

WORLDS: Final = ("small", "medium", "full")
"""Names of the worlds; each is a class method of `World`."""
SMALL_NOUNS: Final = ("apple", "banana", "car", "cat", "fish", "guitar", "house", "key", "star", "umbrella")
MEDIUM_NOUNS: Final = (
    *SMALL_NOUNS,
    *("airplane", "balloon", "bell", "butterfly", "cactus", "camera", "carrot", "crab", "cup", "dog", "drum"),
    *("duck", "heart", "mushroom", "penguin", "pizza", "robot", "rocket", "strawberry", "sunflower", "tree", "turtle"),
)

PAIR_SHARE: Final = 8
"""One pair in so many is never trained on."""
PROMPT_SHARE: Final = 10
"""One prompt in so many is kept from training, in all of its wordings."""
FEW_SHARE: Final = 7
"""The same where a category asks for few things in all."""
SALT: Final = 20681054
"""Chosen so that the small world holds out a few of every kind of pair, of no noun most of them."""


@dataclass(frozen=True, eq=False)
class World:
    """`nouns`, `styles` and `colors` by name; ids in scenes are places in these. `atlas` holds just these nouns and
    styles, drawn for pictures of `size` pixels along an edge."""

    size: int
    nouns: tuple[str, ...]
    styles: tuple[str, ...]
    colors: tuple[str, ...]
    atlas: Atlas

    @classmethod
    def of(cls, size: int, nouns: Sequence[str], atlas: Atlas | None = None) -> World:
        """The world of these nouns in all styles and colors, in pictures of `size` pixels, of an atlas or the one that
        `atlas.load` finds. Raises ValueError where the atlas lacks a noun or its sprites do not fit the size."""
        whole = atlas or atlases.load()
        part = whole.of(nouns, whole.styles, min(size // 2, whole.edge))
        return cls(size, tuple(nouns), part.styles, COLORS, part)

    @classmethod
    def small(cls, atlas: Atlas | None = None) -> World:
        """Ten things at 64×64, for CPUs."""
        return cls.of(64, SMALL_NOUNS, atlas)

    @classmethod
    def medium(cls, atlas: Atlas | None = None) -> World:
        """32 things at 128×128, which a model learns in ten minutes of a GPU."""
        return cls.of(128, MEDIUM_NOUNS, atlas)

    @classmethod
    def full(cls, atlas: Atlas | None = None) -> World:
        """All things of nouns.txt at 128×128."""
        return cls.of(128, [noun.name for noun in read_nouns()], atlas)

    @classmethod
    def named(cls, name: str, atlas: Atlas | None = None) -> World:
        """One of `WORLDS`."""
        assert name in WORLDS, name
        world: World = getattr(cls, name)(atlas)
        return world

    def noun(self, index: int) -> Noun:
        """The noun of an id, with its plural."""
        return self.atlas.nouns[index]

    @lru_cache(4)  # noqa: B019 - as long-lived as the world
    def sprites(self, device: torch.device) -> torch.Tensor:
        """(nouns × styles, 4, E, E) uint8 on a device, multiplied by alpha."""
        return torch.from_numpy(self.atlas.sprites).permute(0, 3, 1, 2).contiguous().to(device)

    @lru_cache(4)  # noqa: B019 - as long-lived as the world
    def glyphs(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(fonts, 26, G, G) float32 from 0 to 1, and the letters' widths (fonts, 26), on a device."""
        glyphs = torch.from_numpy(self.atlas.glyphs).float() / 255
        return glyphs.to(device), torch.from_numpy(self.atlas.advances).to(device)

    @cached_property
    def noun_keys(self) -> torch.Tensor:
        """(nouns,) int64: hashes of the names."""
        return _keys(self.nouns)

    @cached_property
    def style_keys(self) -> torch.Tensor:
        """(styles,) int64: hashes of the names."""
        return _keys(self.styles)

    @cached_property
    def color_keys(self) -> torch.Tensor:
        """(colors,) int64: hashes of the names."""
        return _keys(self.colors)


def mix(*parts: torch.Tensor | int) -> torch.Tensor:
    """A hash below 2³² of int64 tensors that broadcast: multiply and shift, as Fibonacci hashing does."""
    mixed = torch.tensor(SALT)
    for part in parts:
        mixed = ((mixed ^ part) * 0x45D9F3B) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
        mixed = mixed ^ (mixed >> 16)
    return mixed


def spell(words: Sequence[str]) -> torch.Tensor:
    """(N, longest) int64: places of the letters in the alphabet, −1 after the end."""
    longest = max(WORD_LENGTHS)
    return torch.tensor([[LETTERS.index(letter) for letter in word] + [-1] * (longest - len(word)) for word in words])


def _keys(names: Sequence[str]) -> torch.Tensor:
    return torch.tensor([zlib.crc32(name.encode()) for name in names], dtype=torch.int64)
