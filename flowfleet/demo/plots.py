"""The pictures that the demo and its repetitions leave. One restrained look: little ink, few colors."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")

from matplotlib import pyplot as plt

INK, QUIET, FAINT = "#1f2933", "#7b8794", "#e4e7eb"
FIRST, SECOND, THIRD = "#b1b8c0", "#0b7285", "#d9822b"
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


@dataclass(frozen=True)
class Curve:
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
        axes.plot(
            *_points(training), color=FIRST, linewidth=2.0, marker="o", markersize=3.5, label="training, with noise"
        )
        axes.plot(*_points(held_out), color=SECOND, linewidth=2.2, marker="o", markersize=7, label="held-out prompts")
        axes.legend(loc="lower right", frameon=False, labelcolor=QUIET, reverse=True)
        for count, reward in zip(held_out.samples, held_out.rewards, strict=True):
            axes.annotate(
                f"{reward:.2f}", (count, reward), (0, 9), textcoords="offset points", ha="center", color=SECOND
            )
        axes.set_ylim(min(0.0, *training.rewards, *held_out.rewards), max(1.0, *training.rewards, *held_out.rewards))
        last = max([*training.samples, *held_out.samples], default=1)
        axes.set_xlim(-0.03 * last, 1.03 * last)
        axes.set_xticks(_ticks(last))
        axes.set_xlabel("samples trained on")
        axes.set_ylabel("mean reward")
        _head(figure, title, subtitle, margin=0.66, foot=0.58)
        _save(figure, path)


def learning_panels(
    path: Path,
    panels: Mapping[str, Sequence[Curve]],
    control: Sequence[Curve],
    title: str,
    subtitle: str,
    x_label: str,
    target: float,
    num_columns: int = 4,
    y_label: str = "mean held-out reward",
) -> None:
    """Small multiples as a PNG: a panel a recipe, a thin line a seed, the control dashed in each, `target` dotted."""
    num_columns = min(num_columns, len(panels))
    num_rows = -(-len(panels) // num_columns)
    with plt.rc_context(STYLE):
        size = (max(6.8, 2.35 * num_columns + 0.9), 1.75 * num_rows + HEAD + 0.5)
        figure, grid = plt.subplots(
            num_rows, num_columns, figsize=size, dpi=DPI, sharex=True, sharey=True, squeeze=False
        )
        for axes, (name, curves) in zip(grid.flat, panels.items(), strict=False):
            _draw_panel(axes, name, curves, control, target)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes in grid.flat[max(0, len(panels) - num_columns) : len(panels)]:
            axes.tick_params(labelbottom=True)
        figure.supxlabel(x_label, color=QUIET, fontsize=9.5, y=0.12 / size[1])
        figure.supylabel(y_label, color=QUIET, fontsize=9.5, x=0.12 / size[0])
        _head(figure, title, subtitle, margin=0.72, foot=0.58)
        figure.subplots_adjust(wspace=0.12, hspace=0.32)
        _save(figure, path)


def _draw_panel(axes: Any, name: str, curves: Sequence[Curve], control: Sequence[Curve], target: float) -> None:
    axes.axhline(target, color=THIRD, linewidth=0.9, linestyle=(0, (1, 2)))
    for curve in control:
        axes.plot(*_points(curve), color=QUIET, linewidth=1.1, linestyle=(0, (4, 2)))
    for curve in curves:
        axes.plot(*_points(curve), color=SECOND, linewidth=1.2, marker="o", markersize=2.2, alpha=0.85)
    axes.set_title(name, loc="left", fontsize=9.5, fontweight="bold", pad=4)


@dataclass(frozen=True)
class Line:
    """A curve in a panel of measures. Dashed: of a control."""

    label: str
    curve: Curve
    color: str = SECOND
    dashed: bool = False


def measure_panels(
    path: Path, panels: Mapping[str, Sequence[Line]], title: str, subtitle: str, x_label: str, num_columns: int = 4
) -> None:
    """Small multiples as a PNG: a panel a measure, each with its own scale; equal labels have one entry below."""
    num_columns = min(num_columns, len(panels))
    num_rows = -(-len(panels) // num_columns)
    with plt.rc_context(STYLE):
        size = (2.5 * num_columns + 0.6, 2.0 * num_rows + HEAD + 0.8)
        figure, grid = plt.subplots(num_rows, num_columns, figsize=size, dpi=DPI, squeeze=False)
        handles: dict[str, Any] = {}
        for axes, (name, lines) in zip(grid.flat, panels.items(), strict=False):
            for line in lines:
                style = (0, (4, 2)) if line.dashed else "-"
                marks = {} if line.dashed else {"marker": "o", "markersize": 3}
                (drawn,) = axes.plot(*_points(line.curve), color=line.color, linewidth=1.5, linestyle=style, **marks)
                handles.setdefault(line.label, drawn)
            axes.set_title(name, loc="left", fontsize=9.5, fontweight="bold", pad=4)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        figure.supxlabel(x_label, color=QUIET, fontsize=9.5, y=0.36 / size[1])
        figure.legend(
            handles.values(), handles, loc="lower center", ncols=len(handles), frameon=False, labelcolor=QUIET
        )
        _head(figure, title, subtitle, margin=0.6, foot=0.85)
        figure.subplots_adjust(wspace=0.32, hspace=0.4)
        _save(figure, path)


def picture_rows(
    path: Path, rows: Mapping[str, Sequence[NDArray[np.uint8]]], heads: Sequence[str], title: str, subtitle: str
) -> None:
    """Pictures in rows, each with its name, as a PNG; `heads` stand over the columns. Pictures are (H, W, 3) uint8."""
    num_columns = len(heads)
    with plt.rc_context(STYLE):
        size = (1.05 * num_columns + 1.6, 1.05 * len(rows) + HEAD + 0.35)
        figure, grid = plt.subplots(len(rows), num_columns, figsize=size, dpi=DPI, squeeze=False)
        for line, (name, pictures) in zip(grid, rows.items(), strict=True):
            for axes, picture in zip(line, pictures, strict=True):
                axes.imshow(picture, interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                axes.grid(False)
                for spine in axes.spines.values():
                    spine.set(visible=True, color=FAINT)
            line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8.5, labelpad=6)
        for axes, head in zip(grid[0], heads, strict=True):
            axes.set_title(head, loc="left", fontsize=8.5, pad=4, family="DejaVu Sans Mono")
        _head(figure, title, subtitle, margin=1.4, foot=0.12)
        figure.subplots_adjust(wspace=0.06, hspace=0.06)
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
    """What a prompt asks to be written, else the start of the prompt, of `width` characters at most."""
    parts = prompt.split('"')
    return parts[1] if len(parts) > 2 else textwrap.shorten(prompt, width, placeholder="…")


def _points(curve: Curve) -> tuple[Sequence[int], Sequence[float]]:
    return curve.samples, curve.rewards


def _ticks(last: int) -> list[int]:
    """Round numbers from 0 to `last`, four to eight of them."""
    raw = max(last, 1) / 6
    size = 10 ** int(np.floor(np.log10(raw)))
    step = max(1, int(next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)))
    return list(range(0, last + 1, step))


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
