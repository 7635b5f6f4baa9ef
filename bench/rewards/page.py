"""Tables and pictures of docs/results.md about rewards, from what `bench.rewards.learning` ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from bench.learning.results import link
from bench.rewards.runs import Trained, Validation
from docs.generate.markdown import table
from flowfleet.demo.plots import FIRST, SECOND, THIRD, Curve, Line, measure_panels, picture_rows, words_of

Topic = Literal["hacking", "judge", "gradients"]
Measure = Callable[[Validation], float]

HACKING: dict[str, Measure] = {
    "the plain reward: −kB": lambda one: one.scores["jpeg_compressibility"],
    "legible: held-out OCR": lambda one: one.scores["ocr"],
    "image_quality": lambda one: one.scores["image_quality"],
    "edge density": lambda one: one.measures["edge_density"],
    "color entropy": lambda one: one.measures["colour_entropy"],
}
JUDGING: dict[str, Measure] = {
    "the judge: P(yes)": lambda one: one.scores["judge"],
    "word's rise in the pixels": lambda one: one.measures["word_rise"],
    "legible: held-out OCR": lambda one: one.scores["ocr"],
}
LABELS = {
    "hacked": "plain reward",
    "guarded": "with guards",
    "judge": "trained",
    "frozen": "frozen",
    "refl": "ReFL",
    "srpo": "SRPO",
    "still": "frozen",
}
COLORS = {
    "hacked": THIRD,
    "guarded": SECOND,
    "judge": SECOND,
    "frozen": FIRST,
    "refl": SECOND,
    "srpo": THIRD,
    "still": FIRST,
}
CONTROLS = {"frozen": "judge", "still": "refl"}
"""Runs that learn nothing, and the recipe that they are of."""
COUNTERS = {
    "questions": ("cache/hit", "cache/miss"),
    "cache hits": ("cache/hit",),
    "calls answered": ("calls/ok",),
    "retries": ("retries",),
    "retries refused": ("retries_refused",),
    "from probabilities": ("answers/logprobs",),
    "read from the text": ("answers/parsed",),
    "unreadable": ("answers/failed",),
}
"""Columns of the judge's table: sums of `flowfleet_reward_judge_*_total`, by outcome."""


def parts(topic: Topic, runs: Sequence[Trained]) -> dict[str, str]:
    """The generated part of the page."""
    if topic == "hacking":
        shown = [
            "![Measures of the held-out pictures over training](images/reward_hacking_curves.png)",
            "![The same prompts and noise before and after](images/reward_hacking.png)",
            _table(runs, HACKING),
        ]
    elif topic == "gradients":
        shown = [
            "![The judge's score over training](images/reward_gradients_curves.png)",
            "![The same prompts and noise before and after](images/reward_gradients.png)",
            _table(runs, JUDGING),
        ]
    else:
        shown = [
            "![The judge's score over training](images/reward_judge_curves.png)",
            "![The same prompts and noise before and after](images/reward_judge.png)",
            _table(runs, JUDGING),
            _judge_table(runs),
        ]
    return {f"learning-{topic}": "\n\n".join(shown)}


def _table(runs: Sequence[Trained], measures: dict[str, Measure]) -> str:
    """A line a job, with each measure before and after."""
    header = ["recipe", "seed", "pictures", *measures, "gated"]
    return table(header, [_row(run, measures) for run in runs])


def _row(run: Trained, measures: dict[str, Measure]) -> list[str]:
    first, last = run.validations[0], run.validations[-1]
    name = link(f"tiny_{CONTROLS.get(run.name, run.name)}") + ", frozen" * (run.name in CONTROLS)
    changes = [f"{measure(first):.3f} → {measure(last):.3f}" for measure in measures.values()]
    return [name, str(run.seed), str(last.generated), *changes, str(run.gated)]


def _judge_table(runs: Sequence[Trained]) -> str:
    """What the judge did for each job, and how often it was right."""
    rows = []
    for run in runs:
        counts = [f"{sum(run.judge.get(name, 0.0) for name in names):.0f}" for names in COUNTERS.values()]
        right = " → ".join(f"{run.validations[place].measures['judge_right']:.1%}" for place in (0, -1))
        rows.append([f"{run.name}, seed {run.seed}", *counts, right])
    return table(["job", *COUNTERS, "right, before → after"], rows)


def draw(topic: Topic, runs: Sequence[Trained], directory: Path, images: Path) -> None:
    """The curves, and pictures of the first held-out prompts as they come. directory: has NAME-SEED/pictures.npz."""
    measures = HACKING if topic == "hacking" else JUDGING
    about = {
        "hacking": ("A plain reward is hacked, a guarded one is not", "Held-out means; a line a seed"),
        "judge": ("A vision-language model as the reward", "Held-out means; a line a seed, dashed: frozen"),
        "gradients": ("Trained on a judge's gradient", "Held-out means; a line a seed, dashed: frozen"),
    }[topic]
    panels = {name: [_line(run, measure) for run in runs] for name, measure in measures.items()}
    measure_panels(images / f"reward_{topic}_curves.png", panels, *about, "training steps", num_columns=5)
    learned = [run for run in runs if run.name not in CONTROLS and run.seed == runs[0].seed]
    rows, heads = {}, list[str]()
    for run in learned:
        with np.load(directory / f"{run.name}-{run.seed}" / "pictures.npz") as kept:
            versions = [str(one.version) for one in run.validations]
            heads = [words_of(str(prompt), 8) for prompt in kept["prompts"]]
            rows["before"] = list(kept[versions[0]])
            rows["after: " + LABELS[run.name].split(",")[0]] = list(kept[versions[-1]])
    subtitle = f"The first {len(heads)} held-out prompts, seed {learned[0].seed}"
    picture_rows(images / f"reward_{topic}.png", rows, heads, "The same prompts and noise, before and after", subtitle)


def _line(run: Trained, measure: Measure) -> Line:
    points = [(one.version, measure(one)) for one in run.validations]
    curve = Curve([version for version, _ in points], [value for _, value in points])
    return Line(LABELS[run.name], curve, COLORS[run.name], run.name in CONTROLS)
