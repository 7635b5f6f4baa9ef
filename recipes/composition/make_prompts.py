"""Write the prompts of all worlds: `python -m recipes.composition.make_prompts`. A rerun gives the same bytes.

Each line has a prompt, and metadata with what GenEval's rules and the judges ask of a picture. No prompt is in two
files of a world, but for those of `weighted`, which are of `train`; `train` and `validation` differ from `seen` and
`unseen` as `world` says: the prompts of validation and seen are kept from training, those of unseen have a combination
that is. Categories take turns, and one without as many prompts has fewer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import torch

from recipes.composition.atlas import blank
from recipes.composition.captions import prompt_lines
from recipes.composition.scenes import CATEGORIES, World, choose
from recipes.composition.world import Split

PROMPTS: Final = Path(__file__).parent / "prompts"
SEED: Final = 20261124
NUM_TRAIN, NUM_VALIDATION, NUM_SEEN, NUM_UNSEEN = 256, 16, 40, 40
"""Prompts of each category."""
VALIDATION_SHARE = 3
"""Where a category has too few held-out prompts for both, validation gets one of so many."""
WORDLESS: Final = tuple(category for category in CATEGORIES if category != "text")
ASKED: Final[Mapping[str, Sequence[str]]] = {
    "small": WORDLESS,
    "medium": WORDLESS,
    "full": CATEGORIES,
}
"""Categories that each world's prompts ask for. The bases of the smaller ones do not learn to write."""
WEIGHTS: Final[Mapping[str, Mapping[str, int]]] = {
    "medium": {
        "counting": 5,
        "color_attr": 4,
        "two_object": 3,
        "single_object": 3,
        "colors": 2,
        "position": 1,
        "style": 1,
    }
}
"""How many prompts `weighted` has of each category, relative to the others: more where the world's base paints fewer
right, as Flow-GRPO does for GenEval (arXiv 2505.05470: 7 of position, 5 of counting, 3 of two colors, 1 of colors and
of two things). `style` is none of GenEval's."""
DRAWS = 40
"""Scenes drawn for each prompt wanted, before a category counts as exhausted."""

Line = dict[str, Any]


def splits(world: World, asked: Sequence[str]) -> dict[str, list[Line]]:
    """The lines of each file of a world, by "train", "validation", "seen" and "unseen". A category that is not asked
    changes no line of another."""
    generator = torch.Generator().manual_seed(SEED)
    parts: dict[str, list[list[Line]]] = {name: [] for name in ("train", "validation", "seen", "unseen")}
    for category in CATEGORIES:
        parts["train"].append(_distinct(world, category, "train", NUM_TRAIN, generator))
        held = _distinct(world, category, "seen", NUM_VALIDATION + NUM_SEEN, generator)
        cut = min(NUM_VALIDATION, len(held) // VALIDATION_SHARE)
        parts["validation"].append(held[:cut])
        parts["seen"].append(held[cut : cut + NUM_SEEN])
        parts["unseen"].append(_distinct(world, category, "unseen", NUM_UNSEEN, generator))
    kept = [place for place, category in enumerate(CATEGORIES) if category in asked]
    return {name: _in_turns(lines[place] for place in kept) for name, lines in parts.items()}


def weighted(lines: Sequence[Line], weights: Mapping[str, int]) -> list[Line]:
    """The first lines of each category, in the shares of `weights`; all of the heaviest one."""
    by_category = {category: [line for line in lines if line["metadata"]["tag"] == category] for category in weights}
    most = max(weights, key=lambda category: weights[category])
    a_weight = len(by_category[most]) / weights[most]
    return _in_turns(ones[: round(a_weight * weights[category])] for category, ones in by_category.items())


def read_prompts(world: str, split: str) -> list[Line]:
    """The lines of prompts/`world`_`split`.jsonl."""
    return read_lines(PROMPTS / f"{world}_{split}.jsonl")


def read_lines(path: Path) -> list[Line]:
    """The lines of a file of prompts."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _distinct(world: World, category: str, split: Split, count: int, generator: torch.Generator) -> list[Line]:
    """At most `count` different prompts of a category, in the order drawn."""
    scenes = choose(world, DRAWS * count, generator, split=split, categories=[category])
    lines = {line["prompt"]: line for line in prompt_lines(world, scenes)}
    return list(lines.values())[:count]


def _in_turns(parts: Iterable[list[Line]]) -> list[Line]:
    return [line for row in zip_longest(*parts) for line in row if line is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PROMPTS, help="folder to write to (prompts/ next to this file)")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for name, asked in ASKED.items():
        files = splits(World.named(name, blank()), asked)
        if name in WEIGHTS:
            files["weighted"] = weighted(files["train"], WEIGHTS[name])
        for split, lines in files.items():
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            (folder / f"{name}_{split}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
