"""Preference data sets of a model's own pictures, as `algorithm.name = "dpo"` reads them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from flowfleet.algorithms.preferences import make_pairs
from recipes.tiny.signs import Pixels

FILE = "preferences.jsonl"


class Preference(NamedTuple):
    """Two pictures (S, S, 3) uint8 of one prompt."""

    prompt: str
    chosen: Pixels
    rejected: Pixels


def preferences_of(
    pictures: Pixels, prompts: Sequence[str], rewards: Sequence[float], each: int, pairs_per_prompt: int
) -> list[Preference]:
    """Pairs of pictures (N, S, S, 3) with N prompts and rewards, `each` of one prompt in a row; see `make_pairs`."""
    pairs = make_pairs(rewards, [row // each for row in range(len(pictures))], pairs_per_prompt)
    return [Preference(prompts[pair.winner], pictures[pair.winner], pictures[pair.loser]) for pair in pairs]


def write_preferences(folder: Path, preferences: Sequence[Preference]) -> None:
    """Writes `FILE` with its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, one in enumerate(preferences):
        line = {"prompt": one.prompt}
        for verdict, picture in (("chosen", one.chosen), ("rejected", one.rejected)):
            line[verdict] = f"{number:05d}-{verdict}.png"
            Image.fromarray(picture).save(folder / line[verdict])
        lines.append(json.dumps(line) + "\n")
    (folder / FILE).write_text("".join(lines), encoding="utf-8")
