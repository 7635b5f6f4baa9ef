"""Boards as pictures, drawn from what Prometheus has: to look at what a user sees where there is no Grafana."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from tests.monitoring.boards import Board, Panel

if TYPE_CHECKING:
    from tests.cluster.prometheus import Server

Lines = dict[str, tuple[list[float], list[float]]]
"""Legend → seconds since the start, values."""

COLORS = ("#3274d9", "#e0752d", "#37872d", "#c4162a", "#8f3bb8", "#e0b400", "#56a64b", "#5794f2")
LEGEND_LENGTH = 14
"""Characters of a pod's name that fit four times below a panel."""
PALETTE = {"green": "#56a64b", "yellow": "#f2cc0c", "orange": "#ff9830", "red": "#e02f44", "blue": "#5794f2"}
PALETTE |= {"purple": "#b877d9", "gray": "#b0b5bd"}
UNITS: Mapping[str, tuple[str, float]] = {
    "s": ("seconds", 1.0),
    "h": ("hours", 1.0),
    "percentunit": ("%", 100.0),
    "bytes": ("MB", 1e-6),
    "Bps": ("MB/s", 1e-6),
    "gbytes": ("GiB", 1.0),
    "sci": ("", 1.0),
    "ops": ("per second", 1.0),
}
"""Grafana's unit → what is written, and the factor to it."""


def draw(server: Server, board: Board, path: Path) -> Path:
    """Draws the board's numbers on top, its other panels below."""
    stats = [panel for panel in board.panels if panel.kind == "stat"]
    charts = [panel for panel in board.panels if panel.kind != "stat"]
    columns, rows = 3, math.ceil(len(charts) / 3)
    figure = plt.figure(figsize=(16.5, 1.5 + 3.7 * rows), facecolor="white", layout="constrained")
    head, body = figure.subfigures(  # type: ignore[misc]  # an array of two
        2, 1, height_ratios=[1.5, 3.7 * rows]
    )
    head.suptitle(f"Flowfleet / {board.title}: {board.description}", x=0.01, ha="left", fontsize=15, fontweight="bold")
    for axes, panel in zip(head.subplots(1, len(stats)), stats, strict=True):
        _stat(axes, panel, server)
    cells = body.subplots(rows, columns, squeeze=False).flat
    for axes, panel in zip(cells, charts, strict=False):
        (_heatmap if panel.kind == "heatmap" else _chart)(axes, panel, server)
    for axes in cells[len(charts) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return path


def _stat(axes: Axes, panel: Panel, server: Server) -> None:
    unit, factor = UNITS.get(panel.unit, ("", 1.0))
    lines = _lines(panel, server)
    latest = [values[-1] * factor for _, values in lines.values() if values]
    text = "  ".join(f"{_short(value)}" for value in latest[:3]) or "no data"
    axes.set_axis_off()
    number = f"{text} {unit}".strip() if latest else text
    axes.text(0.02, 0.2, number, fontsize=22, color="#1f60c4", transform=axes.transAxes)
    axes.text(0.02, 0.85, panel.title, fontsize=11, color="#464c54", transform=axes.transAxes)


def _chart(axes: Axes, panel: Panel, server: Server) -> None:
    unit, factor = UNITS.get(panel.unit, ("", 1.0))
    lines = {name: (x, [value * factor for value in y]) for name, (x, y) in _lines(panel, server).items()}
    _frame(axes, panel, unit)
    if not lines:
        axes.text(0.5, 0.5, "no data", ha="center", color="#9fa7b3", transform=axes.transAxes)
        return
    chosen = {name: PALETTE[color] for name, color in panel.colors.items()}
    colors = [chosen.get(name, COLORS[index % len(COLORS)]) for index, name in enumerate(lines)]
    axes.set_xlim(0, time.time() - server.started)
    if panel.stacked:
        times = sorted({moment for x, _ in lines.values() for moment in x})
        rows = [[dict(zip(x, y, strict=True)).get(moment, 0.0) for moment in times] for x, y in lines.values()]
        axes.stackplot(times, rows, labels=list(lines), colors=colors, alpha=0.75, linewidth=0)
    else:
        for index, (name, (x, y)) in enumerate(lines.items()):
            axes.plot(x, y, label=name, color=colors[index], linewidth=1.8)
    if "min" in panel.defaults:
        axes.set_ylim(bottom=panel.defaults["min"] * factor)
    if "max" in panel.defaults:
        axes.set_ylim(top=panel.defaults["max"] * factor * 1.03)
    if not any(value for _, y in lines.values() for value in y):
        axes.set_ylim(0, 1)
    handles, names = axes.get_legend_handles_labels()
    short = [name if len(name) <= LEGEND_LENGTH or " " in name else f"…{name[1 - LEGEND_LENGTH :]}" for name in names]
    axes.legend(handles, short, loc="upper center", bbox_to_anchor=(0.5, -0.09), fontsize=8, frameon=False, ncols=4)


def _heatmap(axes: Axes, panel: Panel, server: Server) -> None:
    """Prometheus's buckets are cumulative: each less the one below."""
    found = [series for query in panel.queries for series in server.series(query)]
    buckets = sorted(((float(one["metric"]["le"]), dict(one["values"])) for one in found), key=lambda pair: pair[0])
    times = sorted({moment for _, values in buckets for moment in values})
    below = [0.0] * len(times)
    rows = []
    for _, values in buckets:
        row = [float(values.get(moment, "nan")) for moment in times]
        rows.append([here - under for here, under in zip(row, below, strict=True)])
        below = row
    _frame(axes, panel, "")
    if not times:
        axes.text(0.5, 0.5, "no data", ha="center", color="#9fa7b3", transform=axes.transAxes)
        return
    if not any(value > 0 for value in rows[-1]):  # beyond the last bound
        buckets, rows = buckets[:-1], rows[:-1]
    moments = [moment - server.started for moment in times]
    mesh = axes.pcolormesh(moments, range(len(rows)), rows, cmap="Blues", shading="nearest")
    axes.set_yticks(range(len(rows)), [f"≤ {bound:g}" for bound, _ in buckets], fontsize=7)
    axes.figure.colorbar(mesh, ax=axes, label="scores a second")
    axes.grid(False)


def _frame(axes: Axes, panel: Panel, unit: str) -> None:
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color="#464c54")
    axes.set_ylabel(unit, fontsize=9)
    axes.grid(True, color="#e4e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(_clock))


def _lines(panel: Panel, server: Server) -> Lines:
    """Without the job's id where there is only one job."""
    found = [(query, series) for query in panel.queries for series in server.series(query)]
    jobs = {series["metric"].get("job") for _, series in found}
    shown: Lines = {}
    for query, series in found:
        legend = re.sub(r"\s*{{job}}", "", query.legend) if len(jobs) == 1 else query.legend
        name = re.sub(r"{{(\w+)}}", _label(series["metric"]), legend).strip() or panel.title
        points = [(moment - server.started, float(value)) for moment, value in series["values"]]
        kept = [(moment, value) for moment, value in points if math.isfinite(value)]
        if kept:
            shown[name] = ([moment for moment, _ in kept], [value for _, value in kept])
    return shown


def _label(metric: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
    return lambda match: metric.get(match[1], "") if match[1] != "instance" or "pod" not in metric else ""


def _clock(seconds: float, _: Any) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
