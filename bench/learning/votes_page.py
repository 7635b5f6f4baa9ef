"""The table and the pictures of docs/results.md about votes, from what `bench.learning.votes` ran."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.learning.results import link
from docs.generate.markdown import rewrite, table
from flowfleet.demo.plots import FIRST, THIRD, Curve, Line, measure_panels, picture_rows, words_of

PAGE = Path("docs/results.md")
RESULTS = Path("bench/results/rewards/learning-votes.json")
LABELS = {"warm": "votes for warm colors, one of ten wrong", "random": "votes at random"}
SHORT = {"warm": "voted warm", "random": "at random"}
COLORS = {"warm": THIRD, "random": FIRST}
HEADER = (
    "votes for",
    "seed",
    "votes",
    "red − blue",
    "rise in std of the mean",
    "in std of the pictures",
    "consistency",
)

Run = Mapping[str, Any]


def write_page(directory: Path, page: Path = PAGE, results: Path = RESULTS) -> None:
    """Results, pictures and the table, by the runs in a directory; results of runs that are not there stay as they are,
    and so do the pictures of the first seed."""
    found = [json.loads(path.read_text()) for path in sorted(directory.glob("*/run.json"))]
    kept = json.loads(results.read_text()) if results.exists() else []
    newest = {(run["voter"], run["seed"]): run for run in [*kept, *found]}
    runs = list(newest.values())
    runs.sort(key=lambda run: ([*LABELS].index(run["voter"]), run["seed"]))
    results.write_text(json.dumps(runs, indent=1) + "\n")
    draw(runs, directory, page.parent / "images")
    rewrite(page, {"learning-votes": part(runs)})


def part(runs: Sequence[Run]) -> str:
    """The generated part of the page."""
    shown = [
        "![Red minus blue of the held-out pictures over training](images/votes_curves.png)",
        "![The same prompts and noise before and after](images/votes.png)",
        table(HEADER, map(_row, runs)),
    ]
    return "\n\n".join(shown)


def _row(run: Run) -> list[str]:
    name = {"warm": f"{link('tiny_votes')}: warm colors", "random": "nothing: at random"}[run["voter"]]
    consistency = "–" if run["consistency"] is None else f"{run['consistency']:.2f} of {run['repeats']}"
    figures = [f"{run[key]:+.1f}" for key in ("rise_in_std_of_mean", "rise_in_std_of_pictures")]
    change = f"{run['before']:.1f} → {run['after']:.1f}"
    return [name, str(run["seed"]), str(run["votes"]), change, *figures, consistency]


def draw(runs: Sequence[Run], directory: Path, images: Path) -> None:
    """The curves, and pictures of the first held-out prompts as they come. directory: has VOTER-SEED/pictures.npz."""
    panels: dict[str, list[Line]] = {}
    for run in runs:
        steps, warmths = zip(*run["curve"], strict=True)
        voter = run["voter"]
        line = Line(LABELS[voter], Curve(steps, warmths), COLORS[voter], dashed=voter != "warm")
        panels.setdefault(f"seed {run['seed']}", []).append(line)
    about = ("Votes turn a model", "Mean of red minus blue of the held-out pictures")
    measure_panels(images / "votes_curves.png", panels, *about, "training steps, about 60 votes each")
    first = [run for run in runs if run["seed"] == runs[0]["seed"]]
    if not all(_pictures(directory, run).exists() for run in first):
        return
    rows, heads = {}, list[str]()
    for run in first:
        with np.load(_pictures(directory, run)) as kept:
            versions = [str(version) for version, _ in run["curve"]]
            heads = [words_of(str(prompt), 8) for prompt in kept["prompts"]]
            rows["before"] = list(kept[versions[0]])
            rows[SHORT[run["voter"]]] = list(kept[versions[-1]])
    subtitle = f"The first {len(heads)} held-out prompts, seed {runs[0]['seed']}"
    picture_rows(images / "votes.png", rows, heads, "The same prompts and noise, before and after votes", subtitle)


def _pictures(directory: Path, run: Run) -> Path:
    return directory / f"{run['voter']}-{run['seed']}" / "pictures.npz"
