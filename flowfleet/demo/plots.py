"""The pictures that the demo leaves. One restrained look: little ink, few colors."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

INK, QUIET, FAINT = "#1f2933", "#7b8794", "#e4e7eb"
FIRST, SECOND = "#b1b8c0", "#0b7285"
DPI = 144
HEAD, MAX_INDENT = 1.0, 0.3
"""Inches: from the top of a figure to its axes, and where its title may start."""
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": QUIET,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "ytick.left": False,
}


class Curve(NamedTuple):
    """Points of a line: how many samples were trained on, and the mean reward then."""

    samples: Sequence[int]
    rewards: Sequence[float]


@dataclass(frozen=True)
class Pair:
    """The same prompt and noise before and after training. Pictures, or strips of frames, are (H, W, 3) uint8."""

    prompt: str
    before: NDArray[np.uint8]
    after: NDArray[np.uint8]
    score_before: float | None
    score_after: float | None

    @property
    def is_film(self) -> bool:
        """Strips are drawn one below the other, pictures side by side."""
        return bool(self.before.shape[1] > 2 * self.before.shape[0])


def reward_curve(path: Path, training: Curve, held_out: Curve, title: str, subtitle: str) -> None:
    """Training reward a step and held-out reward, over the samples trained on, as a PNG."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=DPI)
        for (samples, rewards), color, width, size, label in (
            (training, FIRST, 2.0, 3.5, "training, with noise"),
            (held_out, SECOND, 2.2, 7.0, "held-out prompts"),
        ):
            axes.plot(samples, rewards, color=color, linewidth=width, marker="o", markersize=size, label=label)
        axes.legend(loc="lower right", frameon=False, labelcolor=QUIET, reverse=True)
        for count, reward in zip(*held_out, strict=True):
            axes.annotate(
                f"{reward:.2f}", (count, reward), (0, 9), textcoords="offset points", ha="center", color=SECOND
            )
        axes.set_ylim(min(0.0, *training.rewards, *held_out.rewards), max(1.0, *training.rewards, *held_out.rewards))
        last = max([*training.samples, *held_out.samples], default=1)
        axes.set_xlim(-0.03 * last, 1.03 * last)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
        axes.set_xlabel("samples trained on")
        axes.set_ylabel("mean reward")
        _head(figure, title, subtitle, margin=0.66, foot=0.58)
        _save(figure, path)


def before_after(path: Path, pairs: Sequence[Pair], title: str, subtitle: str, num_columns: int | None = None) -> None:
    """A grid of picture pairs with the words asked for and the scores, as a PNG; by default 6 columns, of films 3."""
    films = any(pair.is_film for pair in pairs)
    num_columns = num_columns or (3 if films else 6)
    num_rows = -(-len(pairs) // num_columns)
    width, height = (3.9, 1.95) if films else (1.95, 1.42)
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(width * num_columns, height * num_rows + HEAD), dpi=DPI)
        grid = figure.add_gridspec(max(1, num_rows), num_columns, wspace=0.14, hspace=0.25 if films else 0.5)
        for index, pair in enumerate(pairs):
            _draw_pair(figure, grid[index // num_columns, index % num_columns], pair)
        _head(figure, title, subtitle, margin=0.28, foot=0.42)
        _save(figure, path)


def _draw_pair(figure: Any, cell: Any, pair: Pair) -> None:
    halves = cell.subgridspec(2, 1, hspace=0.08) if pair.is_film else cell.subgridspec(1, 2, wspace=0.05)
    shown = ((pair.before, pair.score_before, QUIET), (pair.after, pair.score_after, SECOND))
    for index, (picture, score, color) in enumerate(shown):
        axes = figure.add_subplot(halves[index])
        axes.imshow(picture, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set(visible=True, color=FAINT)
        label = "no score" if score is None else f"{score:.2f}"
        if pair.is_film:
            axes.set_ylabel(label, color=color, fontsize=8.5, labelpad=3)
        else:
            axes.set_xlabel(label, color=color, fontsize=8.5, labelpad=3)
        if index == 0:
            words = words_of(pair.prompt, 48 if pair.is_film else 24)
            axes.set_title(words, loc="left", fontsize=8.5, pad=4, family="DejaVu Sans Mono")


def words_of(prompt: str, width: int = 24) -> str:
    """Returns the words that a prompt wants written, else the start of the prompt, of `width` characters at most."""
    parts = prompt.split('"')
    return parts[1] if len(parts) > 2 else textwrap.shorten(prompt, width, placeholder="…")


def _head(figure: Any, title: str, subtitle: str, margin: float, foot: float) -> None:
    """Title and subtitle over the axes; `margin` (left and right) and `foot` (bottom) in inches."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(left=margin / width, right=1 - 0.28 / width, top=1 - HEAD / height, bottom=foot / height)
    left = min(margin, MAX_INDENT) / width
    figure.text(left, 1 - 0.2 / height, title, fontsize=13, fontweight="bold", va="top")
    figure.text(left, 1 - 0.47 / height, subtitle, fontsize=9.5, color=QUIET, va="top")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white")
    plt.close(figure)
