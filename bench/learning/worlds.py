"""What studies in the larger worlds of composition begin with: a base and two judges, made where they are missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from flowfleet.demo.demos import Made
from recipes.composition.judges.service import FOLDER

WORLD_OF: Final = {"medium": "medium", "full": "full", "full_settings": "full"}
"""World of a study; the small one, whose base the demo makes and whose judges are shipped, of all others."""


def world_of(studies: Sequence[str]) -> str | None:
    """The larger world that these studies are of, None for the small one. ValueError where they are of several."""
    found = {WORLD_OF.get(study) for study in studies}
    if len(found) > 1:
        raise ValueError(f"{', '.join(studies)} are of several worlds, each with judges of its own: run one by one")
    return found.pop()


def parts(world: str, directory: Path) -> list[Made]:
    """The base, then the judges."""
    place, again = (directory / world).absolute(), "start again"
    base = Made(place / "base", f"recipes.composition.pretrain --world {world}", "the base", again)
    return [base, *(_judge(world, place / "judges", name, again) for name in ("reward", "heldout"))]


def make_world(wanted: Sequence[Made], gpus: Sequence[str], say: Callable[[str], None]) -> None:
    """Makes what is missing of `parts`, all at once on the GPUs in turn, and names the judges to what starts from now
    on. `say` gets the lines of their logs, which begin with what is made. ValueError without a GPU, and where one
    fails."""
    if not any(gpus) and not all(part.path.exists() for part in wanted):
        raise ValueError(f"a larger world is made on a GPU: give --gpus 0, or --model and ${FOLDER}")

    def make(number: int, part: Made) -> None:
        part.make(lambda line: say(f"{part.what}: {line}"), {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]})

    with ThreadPoolExecutor(len(wanted)) as pool:
        list(pool.map(make, range(len(wanted)), wanted))
    os.environ[FOLDER] = str(wanted[1].path.parent)


def _judge(world: str, folder: Path, name: str, again: str) -> Made:
    command = f"recipes.composition.judges.train_{name} --world {world} --scenes 0"
    return Made(folder / f"{name}-128.safetensors", command, f"the judge {name!r}", again)
