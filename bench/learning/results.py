"""What the runs of docs/results.md came to: their curves, and the tables made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from docs.generate.markdown import table
from flowfleet.algorithms.registry import ALGORITHMS, LOSSES
from flowfleet.algorithms.windows import default_end
from flowfleet.demo.plots import Curve

TARGET = 0.85
"""Held-out reward that a recipe is timed to."""
PHASES = (
    "gen",
    "reward",
    "adv",
    "load_samples",
    "reward_gradient",
    "ref",
    "old_log_prob",
    "old_policy",
    "teacher",
    "update_actor",
    "update_weights",
)
"""Metrics `timing_s/…` that together are a step without what it waits for: validations, and checkpoints."""
STALENESS = "training/off_policy/trajectory_staleness/mean"
NONE = "–"

SETTINGS_HEADER = ("recipe", "trains", "learning rate", "updates a step", "steps carry noise", "its loss, and samples")


@dataclass(frozen=True)
class Point:
    """A validation of a run."""

    generated: int
    """Pictures or videos made for training so far (of a preference data set: read), whether trained on or not."""
    seconds: float
    """Training time so far."""
    reward: float


@dataclass(frozen=True)
class Result:
    """A finished run: its summary.json with the job's settings, and its validations in order."""

    summary: Mapping[str, Any]
    points: Sequence[Point]
    staleness: float = 0.0
    """Versions between sampling and training, mean over samples."""

    @property
    def settings(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.summary["settings"]
        return found

    def first_at(self, target: float, amount: Callable[[Point], float]) -> float | None:
        """How many pictures or seconds it took to a held-out reward, linear between validations; None: never."""
        return first_crossing([(amount(point), point.reward) for point in self.points], target)

    def change(self, name: str) -> float | None:
        """Change of `edge_density` or `colour_entropy` over training, in percent."""
        before, after = self.summary[f"{name}_before"], self.summary[f"{name}_after"]
        return 100.0 * (after / before - 1.0) if before and after is not None else None


def read_result(directory: Path, metric: str = "val/reward") -> Result:
    """Reads a directory with summary.json and metrics.jsonl, whose points are this metric's."""
    summary = json.loads((directory / "summary.json").read_text())
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    per_step = made_a_step(summary["settings"]["rollout"])
    stale = [row[STALENESS] for row in rows if row.get(STALENESS) is not None]
    return Result(summary, points_of(rows, per_step, metric), statistics.fmean(stale or [0.0]))


class Keyed(Protocol):
    """A line of a table of runs."""

    @property
    def key(self) -> str:
        """What its directories begin with."""


Line = TypeVar("Line", bound=Keyed)


def read_all(
    lines: Sequence[Line], seeds: Sequence[int], directory: Path, metric: str = "val/reward"
) -> dict[Line, list[Result]]:
    """Reads the finished runs, whose points are this metric's; lines without any are left out."""
    paths = {line: [directory / f"{line.key}-{seed}" for seed in seeds] for line in lines}
    found = {
        line: [read_result(path, metric) for path in some if (path / "summary.json").exists()]
        for line, some in paths.items()
    }
    return {line: runs for line, runs in found.items() if runs}


def made_a_step(rollout: Mapping[str, Any]) -> int:
    """Pictures or videos made for a step, previews included."""
    made: int = rollout["prompts_per_step"] * (rollout["group_size"] + previewed(rollout))
    return made


def previewed(rollout: Mapping[str, Any]) -> int:
    """Samples of a group that previews chose, which are made once more; 0 without previews."""
    return rollout.get("preview", {}).get("keep") or 0


def points_of(rows: Iterable[Mapping[str, Any]], per_step: int, metric: str = "val/reward") -> list[Point]:
    """The validations in rows of metrics.jsonl, the row of whose step is the number of steps before them.

    per_step: pictures made for a step, previews included. Those made again in place of dropped ones are not counted.
    """
    points, seconds = list[Point](), 0.0
    for row in sorted(rows, key=lambda row: int(row["step"])):
        if row.get(metric) is not None:
            points.append(Point(row["step"] * per_step, seconds, row[metric]))
        seconds += sum(row.get(f"timing_s/{phase}") or 0.0 for phase in PHASES)
    return points


def first_crossing(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """The smallest x at which the line through (x, y) points, x ascending, is at `target` or above; None: nowhere."""
    for (x, y), (x_before, y_before) in zip(points, [points[0], *points] if points else [], strict=False):
        if y >= target:
            return x if y == y_before or y_before >= target else x_before + (x - x_before) * _share(y_before, y, target)
    return None


def _share(low: float, high: float, target: float) -> float:
    return (target - low) / (high - low)


def curve(result: Result) -> Curve:
    """Its validations over the pictures generated."""
    return Curve([point.generated for point in result.points], [point.reward for point in result.points])


def results_row(recipe: str, title: str, results: Sequence[Result]) -> list[str]:
    """Summarizes one recipe over its seeds."""
    summaries = [result.summary for result in results]
    return [
        recipe,
        title,
        *gains(
            [summary["held_out_reward_before"] for summary in summaries],
            [summary["held_out_reward_after"] for summary in summaries],
            [summary["bootstrap_ci95"][0] for summary in summaries],
        ),
        reached([result.first_at(TARGET, lambda point: point.generated) for result in results]),
        reached([result.first_at(TARGET, lambda point: point.seconds) for result in results]),
        *changes(results),
    ]


def gains(before: Sequence[float], after: Sequence[float], least: Sequence[float]) -> list[str]:
    """Before, after, gain and its least lower bound, over seeds."""
    gained = [late - early for early, late in zip(before, after, strict=True)]
    return [spread(before, ".3f"), spread(after, ".3f"), spread(gained, "+.3f"), f"≥ {min(least):+.3f}"]


def changes(results: Sequence[Result]) -> list[str]:
    """How edges and colors changed, over seeds."""
    return [percent([run.change(name) for run in results]) for name in ("edge_density", "colour_entropy")]


def spread(values: Sequence[float], form: str) -> str:
    """Mean (least … greatest); of one value itself."""
    mean, low, high = (format(value, form) for value in (statistics.fmean(values), min(values), max(values)))
    return f"{mean} ({low} … {high})" if len(values) > 1 else mean


def reached(values: Sequence[float | None]) -> str:
    """Mean over those that got there, and how many did if not all."""
    known = [value for value in values if value is not None]
    if not known:
        return NONE
    mean = f"{statistics.fmean(known):,.0f}"
    return mean if len(known) == len(values) else f"{mean} ({len(known)} of {len(values)} seeds)"


def percent(values: Sequence[float | None]) -> str:
    """Mean change."""
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):+.1f} %" if known else NONE


def settings_row(recipe: str, settings: Mapping[str, Any]) -> list[str]:
    """What a user would choose, of a job as submitted."""
    trainer = settings["trainer"]
    mode = f"LoRA of rank {trainer['lora']['rank']}" if trainer["mode"] == "lora" else "all weights"
    learning_rate = f"{trainer['optimizer']['lr']:.0e}".replace("e-0", "e-")
    return [recipe, mode, learning_rate, str(trainer["updates_per_step"]), noise_of(settings), _algorithm_of(settings)]


def noise_of(settings: Mapping[str, Any]) -> str:
    """Which of the sampler's steps are noisy, and how; or how tokens are drawn."""
    if LOSSES[settings["algorithm"]["loss"]].kind == "sequence":
        return f"tokens drawn at temperature {settings['rollout']['sequence']['temperature']:g}"
    noise, window = settings["rollout"]["noise"], settings["rollout"]["window"]
    if not noise["eta"]:
        return "none"
    low, size, steps = window["low"], window["size"], settings["rollout"]["num_inference_steps"]
    high = window["high"] or default_end(window["strategy"], num_steps=steps, size=size, low=low)
    shared = ", one initial noise a group" if noise["share_initial_noise"] else ""
    moves = f"{window['stride']} on after {window['shift_every']} training steps"
    which = {
        "all": f"{low + 1} to {high}",
        "fixed": f"{low + 1} to {low + size}",
        "random": f"{size} at random in {low + 1} to {high}",
        "progressive": f"{size} in {low + 1} to {high}, {moves}",
        "listed": ", ".join(str(index + 1) for index in window.get("steps", ())),
        "fraction": f"{low + 1} to {high}, {window.get('fraction', 0.0):.0%} of them trained",
    }
    return f"{noise['type']} {noise['eta']:g}: {which[window['strategy']]}, of {steps}{shared}"


def _algorithm_of(settings: Mapping[str, Any]) -> str:
    """The settings of its loss, and how many samples a step has."""
    algorithm, rollout = settings["algorithm"], settings["rollout"]
    names = {
        "flow_grpo": ("clip_range", "clip_nats"),
        "grpo_guard": ("clip_range", "clip_nats"),
        "flow_dppo": ("kl_threshold", "kl_threshold_nats"),
        "diffusion_nft": ("beta", "num_noise_levels"),
        "dpo": ("beta", "num_noise_levels"),
        "awm": ("clip_range", "old_kl_coef", "num_noise_levels"),
        "elbo_pg": ("beta", "num_noise_levels"),
        "dgpo": ("beta", "clip_range", "num_noise_levels"),
        "crd": ("beta", "num_noise_levels"),
        "gspo": ("clip_range", "clip_range_low"),
        "grpo": ("clip_range", "clip_range_low", "aggregation"),
        "diffusion_opd": (),
    }
    given = {name: algorithm[name] for name in names[algorithm["loss"]] if algorithm[name] is not None}
    shown = [f"`{name}` {value if isinstance(value, str) else format(value, 'g')}" for name, value in given.items()]
    if LOSSES[algorithm["loss"]].keeps_old_policy:
        old = {name: value for name, value in algorithm["old_policy"].items() if name != "samples"}
        idle = "" if algorithm["old_policy"].get("samples", True) else ", does not sample"
        shown.append("`old_policy` " + ", ".join(f"{name} {value:g}" for name, value in old.items()) + idle)
    if algorithm["name"] == "online_dpo":
        shown.append(f"`pairs_per_group` {algorithm['pairs_per_group']}")
    if algorithm["kl_coef"]:
        shown.append(f"`kl_coef` {algorithm['kl_coef']:g}")
    if algorithm.get("diversity"):
        doubt, every = " and ".join(algorithm["kl_gate"]["rewards"]), algorithm["kl_reference"]["every"]
        shown.append(f"bonus for diversity, KL where {doubt} doubts, to the policy of every {every} training steps")
    if taught := algorithm.get("teachers"):
        shown.append(f"teachers {' and '.join(taught)}")
    if kept := previewed(rollout):
        steps, size = rollout["preview"]["num_inference_steps"], rollout["group_size"]
        return ", ".join(
            [*shown, f"{rollout['prompts_per_step']} × {size} previews of {steps} steps, {kept} of each made"]
        )
    return ", ".join([*shown, f"{rollout['prompts_per_step']} × {rollout['group_size']} samples a step"])


def title_of(settings: Mapping[str, Any]) -> str:
    """The algorithm as its authors call it."""
    algorithm = settings["algorithm"]
    title = ALGORITHMS[algorithm["name"]].title
    added = {"GARDO": algorithm.get("diversity"), "previews": previewed(settings["rollout"])}
    return ", ".join([title, *(name for name, value in added.items() if value)])


def link(recipe: str) -> str:
    return f"[{recipe}](../recipes/{recipe}.toml)"


def results_table(rows: Iterable[Sequence[str]], media: str) -> str:
    """media: what is generated, such as "pictures"."""
    needed = (f"{media} to {TARGET}", f"seconds to {TARGET}")
    return table(
        ("recipe", "algorithm", "before", "after", "gain", "at least", *needed, "edges", "colors"),
        rows,
    )


def merged(old: str, new: str) -> str:
    """A table's rows in place of those of `old` with the same first cell; other rows of `old` stay."""
    rows = {line.split("|")[1]: line for line in new.splitlines()[2:]}
    kept = [rows.pop(line.split("|")[1], line) for line in old.splitlines()[2:]]
    return "\n".join([*new.splitlines()[:2], *kept, *rows.values()])


def settings_table(rows: Iterable[Sequence[str]]) -> str:
    return table(SETTINGS_HEADER, rows)
