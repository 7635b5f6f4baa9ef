"""What is measured against a bar: the summary of docs/results.md. Pure, as the other tables are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from docs.generate.markdown import table

Rows = Mapping[str, Mapping[str, Any]]
"""Rows of bench/results by name."""
NONE = "–"
IMAGES, PER_GPU = "images/s", "images/GPU/s"


@dataclass(frozen=True)
class Goal:
    """A line of the summary: what is measured, where its figure is, and the bar."""

    number: str
    what: str
    row: str
    figure: Callable[[Sequence[Mapping[str, Any]]], float | None]
    bar: float
    unit: str
    compared: str
    is_most: bool = False
    """The bar is the most it may be, not the least."""


def _service(key: str) -> Callable[[Sequence[Mapping[str, Any]]], float | None]:
    return lambda figures: next((figure[key] for figure in figures if figure.get("row") == "service"), None)


def _first(*keys: str) -> Callable[[Sequence[Mapping[str, Any]]], float | None]:
    def read(figures: Sequence[Mapping[str, Any]]) -> float | None:
        found: Any = figures[0]
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return None if found is None else float(found)

    return read


def _verified(kind: str) -> Callable[[Sequence[Mapping[str, Any]]], float | None]:
    return lambda figures: next((float(row["verified s"]) for row in reversed(figures) if kind in row["model"]), None)


LOOP = ("services", "images_per_gpu_s")
GOALS = (
    Goal("1", "rollout, no CFG, bf16", "rollout", _service("images_per_s"), 2.8, IMAGES, "kernels' bound 3.3–3.45"),
    Goal("1 (vLLM-Omni)", "rollout, no CFG, bf16", "rollout-omni", _service("images_per_s"), 2.8, IMAGES, ""),
    Goal("1b", "rollout, no CFG, fp8 linears", "rollout-fp8", _service("images_per_s"), 4.0, IMAGES, ""),
    Goal(
        "1b (vLLM-Omni)", "rollout, no CFG, fp8 linears", "rollout-omni-fp8", _service("images_per_s"), 4.0, IMAGES, ""
    ),
    Goal("2", "rollout, CFG 4", "rollout-cfg", _service("images_per_s"), 1.4, IMAGES, "published 1.19 (H800)"),
    Goal("2 (vLLM-Omni)", "rollout, CFG 4", "rollout-omni-cfg", _service("images_per_s"), 1.4, IMAGES, ""),
    Goal(
        "3", "LoRA r64 update, 1 GPU", "train-lora-1", _first("images_per_s_and_rank"), 5.0, PER_GPU, "82–93 ms a row"
    ),
    Goal("3", "LoRA r64 update, 4 GPUs", "scaling-4", _first("images_per_s_and_rank"), 5.0, PER_GPU, ""),
    Goal("4", "loop, LoRA, no CFG, 1 + 1 GPUs", "loop-lora", _first(*LOOP), 1.3, PER_GPU, "bound 1.65–1.72"),
    Goal("4 (vLLM-Omni)", "loop, LoRA, no CFG, 1 + 1 GPUs", "loop-omni", _first(*LOOP), 1.3, PER_GPU, ""),
    Goal("5", "loop, LoRA, CFG 4, 1 + 1 GPUs", "loop-lora-cfg", _first(*LOOP), 0.65, PER_GPU, "published 0.305"),
    Goal("6", "loop, full, no CFG, 2 + 2 GPUs", "loop-full", _first(*LOOP), 1.1, PER_GPU, "published 0.510"),
    Goal("7", "publish 41 GB, verified", "publish", _verified("full"), 0.8, "s", "naive 0.41 on 4 GPUs", True),
    Goal("7 (3 replicas)", "publish 41 GB, verified", "publish-3", _verified("full"), 0.45, "s", "", True),
    Goal("8", "publish LoRA r64, verified", "publish", _verified("LoRA"), 0.5, "s", "", True),
    Goal("9", "services / one process", "loop-compare", _first("ratio"), 0.95, "", ""),
    Goal("10", "rollout, no CFG, fp8 base", "rollout-base", _service("images_per_s"), 4.2, IMAGES, ""),
    Goal("11", "LoRA r64 update, fp8 base, 1 GPU", "train-base", _first("images_per_s_and_rank"), 7.6, PER_GPU, ""),
    Goal("12", "loop, LoRA, trainers alone, 2 GPUs", "loop-only-2", _first(*LOOP), 1.8, PER_GPU, ""),
    Goal("12 (bypass)", "12, old log-probs of the rollout", "loop-only-2-bypass", _first(*LOOP), 1.8, PER_GPU, ""),
    Goal("12 (idle)", "loop, LoRA, 1 + 1 GPUs", "loop-idle", _first(*LOOP), 1.8, PER_GPU, ""),
    Goal(
        "12 (idle, bypass)",
        "the same, old log-probs of the rollout",
        "loop-idle-bypass",
        _first(*LOOP),
        1.8,
        PER_GPU,
        "",
    ),
    Goal("13", "loop, LoRA, fp8 base, trainers alone, 2 GPUs", "loop-base-only", _first(*LOOP), 2.3, PER_GPU, ""),
    Goal("14", "the same, CFG 4", "loop-base-cfg", _first(*LOOP), 1.1, PER_GPU, ""),
    Goal("15", "13 with a tail of 3 steps", "loop-base-flash", _first(*LOOP), 2.8, PER_GPU, ""),
    Goal("16", "13 on 1 GPU", "loop-base-one", _first(*LOOP), 2.19, PER_GPU, "95 % of 13"),
    Goal("17", "services / one process, fp8 base", "loop-base-compare", _first("ratio"), 0.97, "", ""),
    Goal("18", "loop, full, all fp8, 2 + 2 GPUs", "loop-full-fp8", _first(*LOOP), 1.7, PER_GPU, ""),
    Goal("19", "13 on 4 GPUs", "loop-base-only-4", _first(*LOOP), 2.4, PER_GPU, "95 % of 16"),
    Goal("19 (idle)", "13 on 2 + 2 GPUs", "loop-base-idle-4", _first(*LOOP), 2.4, PER_GPU, "95 % of 16"),
    Goal("20", "Wan A14B at 720p, 4 GPUs a video", "parallel", _first("degrees", "4", "speed_up"), 3.0, "×", ""),
)


def summary(rows: Rows) -> str:
    """Every goal with its bar."""
    lines = []
    for goal in GOALS:
        figures = rows[goal.row]["figures"] if goal.row in rows else []
        value = goal.figure(figures) if figures else None
        bar = f"{'≤' if goal.is_most else '≥'} {goal.bar:g} {goal.unit}".strip()
        met = NONE if value is None else "yes" if (value <= goal.bar) == goal.is_most or value == goal.bar else "no"
        measured = "not measured" if value is None else f"{_shown(value, goal.bar)} {goal.unit}".strip()
        lines.append([goal.number, goal.what, _engine(figures), measured, bar, met, goal.compared or NONE])
    return table(["#", "what", "engine", "measured", "bar", "met", "for comparison"], lines)


def _shown(value: float, bar: float) -> str:
    """Two digits; as many as tell it from the bar where those would not."""
    return next((it for it in (f"{value:.{digits}f}" for digits in range(2, 6)) if float(it) != bar), f"{value:.2f}")


def _engine(figures: Sequence[Mapping[str, Any]]) -> str:
    """Engine of the rollouts, as the bench reported it; empty where nothing is sampled."""
    return next((engine for it in figures if (engine := (it.get("settings") or it).get("engine"))), NONE)
