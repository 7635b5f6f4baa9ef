"""The command line that trains a judge, writes it, and measures it on renders."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from recipes.composition.judges.agreement import Judge, measure, table
from recipes.composition.scenes import CATEGORIES, World
from recipes.composition.world import WORLDS


class Trained(Judge, Protocol):
    """A judge that can be kept."""

    reads: bool
    """Whether it looks for words."""

    def save(self, path: Path) -> None:
        """Write the judge."""


def train_and_measure(about: str | None, train: Callable[[World, torch.device, int | None], Trained]) -> None:
    """`train` takes a world, a device and a number of iterations, None for the default."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--world", choices=WORLDS, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--iterations", type=int, help="in place of the default")
    parser.add_argument("--scenes", type=int, default=1024, help="renders that agreement is measured on; 0: none")
    parser.add_argument("--categories", nargs="+", choices=CATEGORIES, default=CATEGORIES, help="of these renders")
    options = parser.parse_args()
    world = World.named(options.world)
    begun = time.monotonic()
    judge = train(world, torch.device(options.device), options.iterations)
    print(f"trained in {time.monotonic() - begun:.0f} s")
    judge.save(options.output)
    if options.scenes:
        judge.reads = "text" in options.categories
        print(table(measure(judge, world, options.scenes, categories=options.categories)))
