"""How often a judge agrees with the truth: on renders, each asked for what it shows and for something else.

python -m recipes.composition.judges.agreement --world small --reward FILE --heldout FILE
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from recipes.composition.captions import altered, prompt_lines
from recipes.composition.judges.findings import Findings, answer
from recipes.composition.render import render
from recipes.composition.scenes import CATEGORIES, World, draw
from recipes.composition.world import WORLDS, Split

SEED = 999
"""Seed of the scenes that agreement is measured on; no judge is trained with it."""
BATCH = 128


class Judge(Protocol):
    """What finds things in pictures."""

    def look(self, pictures: torch.Tensor) -> list[Findings]:
        """Findings of pictures (N, 3, S, S) float32 from 0 to 1."""


@dataclass(frozen=True)
class Agreement:
    """Shares of renders on which a judge says what is so. `right`: asked for what is shown; `wrong`: for another."""

    right: float
    wrong: float
    num_scenes: int

    @property
    def mean(self) -> float:
        return (self.right + self.wrong) / 2


def measure(
    judge: Judge, world: World, num_scenes: int, split: Split = "train", categories: Sequence[str] = CATEGORIES
) -> dict[str, Agreement]:
    """Agreement by category, over at least `num_scenes` renders of all together, in 8 bits as stored pictures are."""
    generator = torch.Generator().manual_seed(SEED)
    said: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
    for _ in range(0, num_scenes, BATCH):
        scenes = draw(world, BATCH, generator, split=split, categories=categories)
        pictures = (render(world, scenes, "cpu") * 255).round() / 255
        other = altered(world, scenes, generator)
        is_twice = (other.nouns[:, 0] == other.nouns[:, 1]) & (scenes.category == CATEGORIES.index("two_object"))
        lines = zip(prompt_lines(world, scenes), prompt_lines(world, other), is_twice.tolist(), strict=True)
        for findings, (true, false, is_same) in zip(judge.look(pictures), lines, strict=True):
            if is_same:  # "a cat and a cat" asks for less than the picture shows
                continue
            verdicts = [answer(findings, line["metadata"])["correct"] for line in (true, false)]
            said[true["metadata"]["tag"]].append((verdicts[0] == 1.0, verdicts[1] == 0.0))
    return {name: _shares(said[name]) for name in categories}


def _shares(said: Sequence[tuple[bool, bool]]) -> Agreement:
    right, wrong = (sum(column) / len(said) for column in zip(*said, strict=True))
    return Agreement(right, wrong, len(said))


def table(agreement: Mapping[str, Agreement]) -> str:
    """The figures as Markdown."""
    lines = ["| category | says yes to what is shown | says no to another | mean |", "|---|---|---|---|"]
    lines += [f"| {name} | {one.right:.3f} | {one.wrong:.3f} | {one.mean:.3f} |" for name, one in agreement.items()]
    columns = [[getattr(one, name) for one in agreement.values()] for name in ("right", "wrong", "mean")]
    lines.append("| mean | " + " | ".join(f"{sum(column) / len(column):.3f}" for column in columns) + " |")
    return "\n".join(lines)


def main() -> None:
    from recipes.composition.judges.loading import load_judge  # which both judges' packages come with

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", choices=WORLDS, required=True)
    parser.add_argument("--reward", type=Path)
    parser.add_argument("--heldout", type=Path)
    parser.add_argument("--scenes", type=int, default=4000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    world = getattr(World, options.world)()
    for name in ("reward", "heldout"):
        if path := getattr(options, name):
            for split in ("train", "unseen"):
                print(f"\n{name}, split {split}\n")
                print(table(measure(load_judge(path, options.device), world, options.scenes, split)))


if __name__ == "__main__":
    main()
