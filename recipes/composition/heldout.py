"""Which scenes a split may show by the rule of `world`: pairs never trained on, and prompts kept for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from recipes.composition.world import CATEGORIES, FEW_SHARE, PAIR_SHARE, PROMPT_SHARE, Split, World, mix

if TYPE_CHECKING:
    from recipes.composition.scenes import Scenes

ALONE, TOGETHER, NUMBER, COLOR, PLACE, STYLE, LETTERS, PROMPT = range(8)
"""Kinds of pairs: noun and nothing else, two nouns, noun and count, noun and color, noun and relation, noun and style,
two letters next to each other. A pair and a prompt of the same numbers hash differently."""
DECISIVE = {
    "single_object": ALONE,
    "two_object": TOGETHER,
    "counting": NUMBER,
    "colors": COLOR,
    "position": PLACE,
    "color_attr": COLOR,
    "text": LETTERS,
    "style": STYLE,
}
"""The kind of pair that is held out in a category's "unseen" scenes; their other pairs are trained on."""
FEW = ("single_object", "counting", "colors", "style")
"""Categories that ask for few things in all, of which one in `FEW_SHARE` is kept from training."""


def held_pairs(world: World, scenes: Scenes) -> torch.Tensor:
    """(N, 7) bool: whether a scene shows a held-out pair of each kind. A noun of which all styles would be held out
    keeps them all."""
    device = scenes.device
    shown = scenes.nouns >= 0
    nouns = world.noun_keys.to(device)[scenes.nouns.clamp(min=0)]
    colors = world.color_keys.to(device)[scenes.colors.clamp(min=0)]
    styles = world.style_keys.to(device)[scenes.styles.clamp(min=0)]
    two = shown[:, 1] & (scenes.nouns[:, 0] != scenes.nouns[:, 1])
    low, high = torch.minimum(nouns[:, 0], nouns[:, 1]), torch.maximum(nouns[:, 0], nouns[:, 1])
    inverse = scenes.relation ^ 1
    unknown = _held(STYLE, nouns[..., None], world.style_keys.to(device)).all(-1)
    left, right = scenes.word[:, :-1], scenes.word[:, 1:]
    return torch.stack(
        [
            _held(ALONE, nouns[:, 0]) & (scenes.count == 1),
            _held(TOGETHER, low, high) & two,
            _held(NUMBER, nouns[:, 0], scenes.count) & shown[:, 1] & ~two,
            (_held(COLOR, nouns, colors) & (scenes.colors >= 0)).any(1),
            (_held(PLACE, nouns[:, 0], scenes.relation) | _held(PLACE, nouns[:, 1], inverse)) & (scenes.relation >= 0),
            (_held(STYLE, nouns, styles) & ~unknown & shown).any(1),
            (_held(LETTERS, left, right) & (right >= 0)).any(1),
        ],
        1,
    )


def is_held_prompt(world: World, scenes: Scenes) -> torch.Tensor:
    """(N,) bool: whether what a scene's prompt asks for is kept from training, in any words: "a cat left of a car" is
    "a car right of a cat". What the prompt does not say has no part in it."""
    device = scenes.device
    nouns = torch.where(scenes.nouns >= 0, world.noun_keys.to(device)[scenes.nouns.clamp(min=0)], 0)
    asks_color = _among(scenes, "colors", "color_attr")[:, None] & (scenes.colors >= 0)
    colors = torch.where(asks_color, world.color_keys.to(device)[scenes.colors.clamp(min=0)], 0)
    style = torch.where(_among(scenes, "style"), world.style_keys.to(device)[scenes.styles[:, 0].clamp(min=0)], 0)
    first, second = mix(PROMPT, nouns[:, 0], colors[:, 0]), mix(PROMPT, nouns[:, 1], colors[:, 1])
    mirrored = (first > second) & (scenes.relation >= 0)
    relation = torch.where(mirrored, scenes.relation ^ 1, scenes.relation)
    things = (torch.minimum(first, second), torch.maximum(first, second))
    mixed = mix(PROMPT, scenes.category, scenes.count, *things, relation + 1, style, *(scenes.word + 1).unbind(1))
    return mixed % torch.where(_among(scenes, *FEW), FEW_SHARE, PROMPT_SHARE) == 0


def is_allowed(world: World, scenes: Scenes, split: Split) -> torch.Tensor:
    """(N,) bool: whether a split may show each scene."""
    if split == "any":
        return torch.ones(len(scenes), dtype=torch.bool, device=scenes.device)
    held = held_pairs(world, scenes)
    if split != "unseen":
        return ~held.any(1) & (is_held_prompt(world, scenes) == (split == "seen"))
    kinds = torch.tensor([DECISIVE[name] for name in CATEGORIES], device=scenes.device)[scenes.category]
    decisive = torch.zeros_like(held).scatter(1, kinds[:, None], True)
    return (held & decisive).any(1) & ~(held & ~decisive).any(1)


def _held(kind: int, *parts: torch.Tensor) -> torch.Tensor:
    return mix(kind, *parts) % PAIR_SHARE == 0


def _among(scenes: Scenes, *names: str) -> torch.Tensor:
    places = torch.tensor([CATEGORIES.index(name) for name in names], device=scenes.device)
    return torch.isin(scenes.category, places)
