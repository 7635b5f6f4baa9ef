"""What the rows of a job's metrics and the rollouts' counters come to. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

BUSY_PARTS = ("encode", "denoise", "decode")
"""Parts of `flowfleet_rollout_seconds_total` that hold the accelerator. Samples are published alongside the next batch.
"""
TRAINER_PHASES = ("load_samples", "ref", "old_log_prob", "old_policy", "update_actor")
"""Metrics `timing_s/…` inside the trainer."""
WAITS = ("reward", "adv")
"""Metrics `timing_s/…` of a step in which neither side computes, unless other work overlaps them."""

Row = Mapping[str, float | None]


def loop_figures(
    rows: Sequence[Row], images: int, gpus: int, busy: Mapping[str, float], window_s: float
) -> dict[str, Any]:
    """Computes the figures of measured steps, given in order.

    Args:
        rows: metrics of the steps.
        images: trained on in each step.
        gpus: accelerators in all, a reward's too.
        busy: seconds of each rollout's accelerator inside the window, by replica; empty where that is not known.
        window_s: wall time of the window.

    `overlap` is the share of the shorter side's work (sampling or training) that the other side's hides.
    """
    steps = [_value(row, "timing_s/step") for row in rows]
    seconds = statistics.fmean(steps)
    trainer_s = statistics.fmean(sum(_value(row, f"timing_s/{phase}") for phase in TRAINER_PHASES) for row in rows)
    publish_s = _mean(rows, "timing_s/update_weights")
    rollout_s = statistics.fmean(busy.values()) * seconds / window_s if busy else 0.0
    return {
        "images_per_gpu_s": images / seconds / gpus,
        "images_per_s": images / seconds,
        "step_s": seconds,
        "step_s_each": [round(step, 3) for step in steps],
        "rollout_busy": {name: min(1.0, value / window_s) for name, value in busy.items()},
        "rollout_idle": max(0.0, 1.0 - rollout_s / seconds) if busy else None,
        "trainer_idle": 1.0 - trainer_s / seconds,
        "overlap": _share_hidden(rollout_s, trainer_s, publish_s, seconds) if busy else None,
        "seconds": {phase: _mean(rows, f"timing_s/{phase}") for phase in (*TRAINER_PHASES, *WAITS, "gen")}
        | {"update_weights": publish_s},
        "published": {
            name: statistics.fmean(found)
            for name in ("drain", "transfer")
            if (found := [value for row in rows if (value := row.get(f"timing_s/{name}")) is not None])
        },
        "others": {
            name: statistics.fmean(_value(row, name) for row in rows)
            for name in sorted(rows[0])
            if name.startswith(("perf/mfu", "perf/peak", "rollout_corr/", "actor/grad_norm", "actor/loss"))
            and all(row.get(name) is not None for row in rows)
        },
    }


def _share_hidden(rollout_s: float, trainer_s: float, publish_s: float, step_s: float) -> float:
    shorter = min(rollout_s, trainer_s)
    hidden = (rollout_s + trainer_s + publish_s - step_s) / shorter if shorter else 0.0
    return max(0.0, min(1.0, hidden))


def _mean(rows: Sequence[Row], name: str) -> float:
    return statistics.fmean(_value(row, name) for row in rows)


def _value(row: Row, name: str) -> float:
    """0 where the step had no such phase."""
    return row.get(name) or 0.0


def rollout_busy_s(exposition: str) -> float:
    """Seconds that a replica's accelerator has worked so far, from the text of its Prometheus endpoint."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in exposition.splitlines()
        if line.startswith("flowfleet_rollout_seconds_total") and any(f'part="{part}"' in line for part in BUSY_PARTS)
    )


def policy_version(exposition: str) -> int:
    """Policy version that a replica serves; -1 if it serves none."""
    for line in exposition.splitlines():
        if line.startswith("flowfleet_rollout_policy_version "):
            return int(float(line.rpartition(" ")[2]))
    return -1
