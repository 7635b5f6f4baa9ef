"""Writes the scorers' tables of docs/scorers.md and docs/rewards.md, and the chart's list of their images.

`python -m docs.generate.scorers` rewrites them, in the directory of the repository.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from docs.generate.fields import rows
from docs.generate.markdown import rewrite, table
from flowfleet.rewards.service import Reward
from flowfleet.scorers import SHARED_IMAGES, Folder, folders, known
from services.reward import scorers
from services.reward.judge.rubrics import Rubric
from services.reward.scorer import ScorerSettings

PAGE: Final = Path("docs/scorers.md")
REWARDS: Final = Path("docs/rewards.md")
CHART: Final = Path("deploy/helm/flowfleet/files/scorers.yaml")


def parts() -> dict[str, str]:
    """Name to content of each generated part of the page of scorers."""
    return {
        "scorers": table(["scorer", "score", "media", "image"], map(_row, folders())),
        "params": "\n\n".join(_lists(_params())),
        "rubric": _listed(rows(Rubric)),
        "settings": "\n\n".join(_lists(_settings())),
    }


def reward_parts() -> dict[str, str]:
    """Name to content of each generated part of the page of rewards that this module writes."""
    return {"serve": table(["argument of `serve`", "default", "meaning"], rows(Reward))}


def chart() -> str:
    """The chart's file: scorers of the images that several share, and those that ask judges."""
    shared = {f"reward{image.removeprefix('reward').strip('-').title()}": image for image in SHARED_IMAGES}
    lines = ["# Written by `make docs` from services/reward/scorers/*/scorer.toml.", "images:"]
    for key, image in shared.items():
        lines.append(f"  {key}: {_names(folder for folder in folders() if folder.image == image)}")
    lines.append(f"judges: {_names(folder for folder in folders() if folder.network == 'judges')}")
    return "\n".join(lines) + "\n"


def _names(chosen: Iterator[Folder]) -> str:
    return json.dumps([name for folder in chosen for name in folder.scorers])


def _row(folder: Folder) -> list[str]:
    names = ", ".join(f"`{name}`" for name in folder.scorers)
    notes = [
        folder.extra and f"`{folder.extra}`",
        folder.network and "network",
        folder.library and folder.library.license,
    ]
    image = ", ".join([f"`{folder.image}`", *(note for note in notes if note)])
    return [f"[{names}]({folder.page})" if folder.page else names, folder.score, folder.media, image]


def _settings() -> dict[type, list[str]]:
    """Classes of settings to the scorers that read them: those that several read first."""
    found: dict[type, list[str]] = {}
    for name in known():
        owner = _class(name, known()[name].scorers[name].settings)
        bases = [] if owner is None else owner.__mro__[: owner.__mro__.index(ScorerSettings)]
        for base in bases:
            found.setdefault(base, []).append(name)
    return dict(sorted(found.items(), key=lambda item: len(item[1]) == 1))


def _params() -> dict[type, list[str]]:
    found: dict[type, list[str]] = {}
    for name in known():
        if owner := _class(name, known()[name].scorers[name].params):
            found.setdefault(owner, []).append(name)
    return found


def _class(scorer: str, name: str) -> type | None:
    if not name:
        return None
    module, _, owner = name.rpartition(":")
    found: type = getattr(importlib.import_module(module or f"{scorers.__name__}.{scorers.SCORERS[scorer]}"), owner)
    return found


def _lists(owners: Mapping[type, list[str]]) -> Iterator[str]:
    """A list for each class that has fields, below the names of its scorers."""
    for owner, names in owners.items():
        if fields := rows(owner):
            yield ", ".join(f"`{name}`" for name in names) + f":\n\n{_listed(fields)}"


def _listed(fields: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"- {name} ({default}): {' '.join(meaning.split())}" for name, default, meaning in fields)


if __name__ == "__main__":
    rewrite(PAGE, parts())
    rewrite(REWARDS, reward_parts())
    CHART.write_text(chart(), encoding="utf-8")
