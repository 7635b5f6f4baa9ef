"""Captions of scenes by a small grammar, captions with flaws, and what a scene asks, as GenEval writes it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from recipes.composition.atlas import LETTERS
from recipes.composition.heldout import is_allowed
from recipes.composition.nouns import article
from recipes.composition.scenes import Scenes
from recipes.composition.world import CATEGORIES, NUM_STYLE_WORDINGS, NUM_WORDINGS, RELATIONS, World

FRAMES: Final = (
    "a photo of {}",
    "a picture of {}",
    "an image of {}",
    "{}",
    "a scene with {}",
    "a view of {}",
    "a postcard of {}",
    "this shows {}",
)
STYLE_FRAMES: Final = (
    "a {style} picture of {}",
    "a {style} drawing of {}",
    "{} in {style} style",
    "a picture of {} in {style} style",
)
NUMBERS: Final = ("no", "one", "two", "three", "four")
PLACES: Final = {
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
SIGNS: Final = ('a sign that says "{}"', 'a sign with the word "{}"', 'a sign that reads "{}"')
SILENT_SIGN: Final = "a sign with a word"
assert (len(FRAMES), len(STYLE_FRAMES)) == (NUM_WORDINGS, NUM_STYLE_WORDINGS)

SINGLE, TWO, COUNTING, COLORS, POSITION, COLOR_ATTR, TEXT, STYLE = range(len(CATEGORIES))
SILENT_AS: Final = {COLORS: SINGLE, STYLE: SINGLE, POSITION: TWO, COLOR_ATTR: TWO, TWO: SINGLE}
"""The category whose caption leaves out what a category is about; the others have silent captions of their own."""


@dataclass(frozen=True)
class _Row:
    """A scene as plain numbers."""

    category: int
    count: int
    nouns: list[int]
    styles: list[int]
    colors: list[int]
    relation: int
    word: str
    wording: int


def caption(world: World, scenes: Scenes) -> list[str]:
    """The sentence that asks for each scene, all of it true."""
    return [_sentence(world, row) for row in _rows(scenes)]


def flawed(world: World, scenes: Scenes, share: float, generator: torch.Generator, *, silent: float = 0.5) -> list[str]:
    """Captions of which a `share` has a flaw: a part `silent` of these leaves out what the scene is about, the others
    say something else than the picture shows.

    A flaw never makes a held-out prompt or combination: the caption is silent instead, or right where its silence is
    a held-out prompt. Random numbers come from the generator, whose device is that of the scenes.
    """
    device = scenes.device
    numbers = torch.rand(2, len(scenes), generator=generator, device=device)
    is_flawed, is_silent = numbers[0] < share, numbers[1] < silent
    wrong = altered(world, scenes, generator)
    said_less = _reduced(scenes)
    is_silent |= ~is_allowed(world, wrong, "train") | (
        (scenes.category == TWO) & (wrong.nouns[:, 0] == wrong.nouns[:, 1])
    )
    keeps_still = torch.isin(scenes.category, torch.tensor([COUNTING, TEXT, SINGLE], device=device))
    may_be_silent = keeps_still | is_allowed(world, said_less, "train")
    choice = torch.where(is_flawed, torch.where(is_silent, torch.where(may_be_silent, 2, 0), 1), 0).tolist()
    rows = zip(_rows(scenes), _rows(wrong), _rows(said_less), choice, strict=True)
    return [
        (_sentence(world, true), _sentence(world, other), _silent(world, true, less))[which]
        for true, other, less, which in rows
    ]


def altered(world: World, scenes: Scenes, generator: torch.Generator) -> Scenes:
    """The scenes with another count, color, relation, word, style or noun than they show, as their category is about.
    Of two colors half are exchanged; the word differs in one letter at least."""
    n, device = len(scenes), scenes.device

    def other(value: torch.Tensor, high: int) -> torch.Tensor:
        step = 1 + torch.randint(high - 1, value.shape, generator=generator, device=device)
        return torch.where(value >= 0, (value + step) % high, value)

    def among(*kinds: int) -> torch.Tensor:
        return torch.isin(scenes.category, torch.tensor(kinds, device=device))

    coin = torch.rand(n, generator=generator, device=device) < 0.5
    nouns, colors, word = scenes.nouns.clone(), scenes.colors.clone(), scenes.word.clone()
    second = coin & among(TWO)
    changed = other(nouns, len(world.nouns))
    nouns[:, 0] = torch.where(among(SINGLE) | (among(TWO) & ~second), changed[:, 0], nouns[:, 0])
    nouns[:, 1] = torch.where(second, changed[:, 1], nouns[:, 1])
    recolored = other(colors, len(world.colors))
    swapped = coin & among(COLOR_ATTR)
    first = torch.where(swapped, colors[:, 1], recolored[:, 0])
    colors[:, 1] = torch.where(swapped, colors[:, 0], colors[:, 1])
    colors[:, 0] = torch.where(among(COLORS, COLOR_ATTR), first, colors[:, 0])
    kept = torch.rand(word.shape, generator=generator, device=device) < 0.3
    kept[:, 0] = False
    word = torch.where(kept, word, other(word, len(LETTERS)))
    count = torch.where(among(COUNTING), 1 + other(scenes.count - 1, 4), scenes.count)
    relation = torch.where(among(POSITION), other(scenes.relation, len(RELATIONS)), scenes.relation)
    styles = torch.where(among(STYLE)[:, None], other(scenes.styles[:, :1], len(world.styles)), scenes.styles)
    styles = torch.where(scenes.styles >= 0, styles, -1)
    return dataclasses.replace(
        scenes, nouns=nouns, colors=colors, word=word, count=count, relation=relation, styles=styles
    )


def words(world: World) -> list[str]:
    """All that captions are made of, sorted: words, the letters A–Z, and the double quote."""
    texts = [*FRAMES, *STYLE_FRAMES, *SIGNS, SILENT_SIGN, *NUMBERS, *world.styles, *world.colors, "and some something"]
    texts += [article(color) for color in world.colors]
    texts += [place for places in PLACES.values() for place in places]
    for index in range(len(world.nouns)):
        noun = world.noun(index)
        texts += [article(noun.name), noun.plural]
    found = {word for text in texts for word in text.replace('"', " ").split() if "{" not in word}
    return sorted(found) + list(LETTERS) + ['"']


def tokens(text: str) -> list[str]:
    """A caption as entries of `words`: what is between quotes letter by letter."""
    outside, *rest = text.split('"')
    parts = outside.split()
    for place, piece in enumerate(rest):
        parts += ['"', *(piece if place % 2 == 0 else piece.split())]
    return parts


def metadata(world: World, scenes: Scenes) -> list[dict[str, Any]]:
    """What each scene asks, as lines of GenEval's evaluation_metadata.jsonl: `tag`, `include`, `exclude`, `prompt`.

    Two tags are ours: "text" adds `word`, and includes a "sign"; "style" adds `style`.
    """
    return [_asked(world, row) for row in _rows(scenes)]


def prompt_lines(world: World, scenes: Scenes) -> list[dict[str, Any]]:
    """Lines of a data set of prompts: `prompt`, and `metadata` with `tag`, `geneval` (JSON, as the scorer reads it),
    and `word` or `style` where asked."""
    lines = []
    for asked in metadata(world, scenes):
        given: dict[str, str] = {key: asked[key] for key in ("tag", "word", "style") if key in asked}
        given["geneval"] = json.dumps({key: asked[key] for key in ("tag", "include", "exclude") if key in asked})
        lines.append({"prompt": asked["prompt"], "metadata": given})
    return lines


def _rows(scenes: Scenes) -> Iterator[_Row]:
    columns = (scenes.category, scenes.count, scenes.nouns, scenes.styles, scenes.colors, scenes.relation, scenes.word)
    lists: list[list[Any]] = [part.tolist() for part in (*columns, scenes.wording)]
    for category, count, nouns, styles, colors, relation, word, wording in zip(*lists, strict=True):
        spelt = "".join(LETTERS[letter] for letter in word if letter >= 0)
        yield _Row(category, count, nouns, styles, colors, relation, spelt, wording)


def _sentence(world: World, row: _Row) -> str:
    if row.category == STYLE:
        frame = STYLE_FRAMES[row.wording % NUM_STYLE_WORDINGS]
        return frame.format(article(world.nouns[row.nouns[0]]), style=world.styles[row.styles[0]])
    return FRAMES[row.wording].format(_content(world, row))


def _content(world: World, row: _Row) -> str:
    """What is said to be in the picture."""
    kind = row.category
    if kind == TEXT:
        return SIGNS[row.wording % len(SIGNS)].format(row.word)
    if kind == COUNTING:
        noun = world.noun(row.nouns[0])
        return f"{NUMBERS[row.count]} {noun.plural if row.count > 1 else noun.name}"
    names = [world.nouns[noun] for noun in row.nouns if noun >= 0]
    if kind in (COLORS, COLOR_ATTR):
        names = [f"{world.colors[color]} {name}" for color, name in zip(row.colors, names, strict=False)]
    things = [article(name) for name in names]
    if kind == POSITION:
        ways = PLACES[RELATIONS[row.relation]]
        return f"{things[0]} {ways[row.wording % len(ways)]} {things[1]}"
    if kind in (SINGLE, COLORS):
        return things[0]
    return " and ".join(things[:2])


def _silent(world: World, row: _Row, less: _Row) -> str:
    """A caption that leaves out what the scene is about."""
    frame = FRAMES[row.wording]
    if row.category == COUNTING:
        return frame.format(f"some {world.noun(row.nouns[0]).plural}")
    if row.category == TEXT:
        return frame.format(SILENT_SIGN)
    return frame.format("something") if row.category == SINGLE else _sentence(world, less)


def _reduced(scenes: Scenes) -> Scenes:
    """The scenes as ones of the category that says less; of two objects the first alone."""
    category, count, nouns = scenes.category.clone(), scenes.count.clone(), scenes.nouns.clone()
    for kind, less in SILENT_AS.items():
        category[scenes.category == kind] = less
    alone = scenes.category == TWO
    count[alone] = 1
    nouns[alone, 1] = -1
    relation = torch.where(scenes.category == POSITION, -1, scenes.relation)
    return dataclasses.replace(scenes, category=category, count=count, nouns=nouns, relation=relation)


def _asked(world: World, row: _Row) -> dict[str, Any]:
    tag = CATEGORIES[row.category]
    names = [world.nouns[noun] for noun in row.nouns if noun >= 0]
    asked: dict[str, Any] = {"tag": tag}
    if row.category == TEXT:
        asked |= {"include": [{"class": "sign", "count": 1}], "word": row.word}
    elif row.category == COUNTING:
        asked["include"] = [{"class": names[0], "count": row.count}]
        asked["exclude"] = [{"class": names[0], "count": row.count + 1}]
    else:
        include: list[dict[str, Any]] = [{"class": name, "count": 1} for name in names]
        if row.category in (COLORS, COLOR_ATTR):
            for entry, color in zip(include, row.colors, strict=False):
                entry["color"] = world.colors[color]
        if row.category == POSITION:  # as GenEval has it: the second entry lies to the first
            include = [include[1], {**include[0], "position": [RELATIONS[row.relation], 0]}]
        asked["include"] = include
        if row.category == STYLE:
            asked["style"] = world.styles[row.styles[0]]
    return {**asked, "prompt": _sentence(world, row)}
