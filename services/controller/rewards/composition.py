"""From the raw scores of a sample to what it counts for. Pure.

    raw score ── gate ──► masked, or a total of 0
        └─ clip ─► × weight × curve(step) ─► summed: the total

A reward without a score (`on_failure = "skip"`) does not count as zero. The total is that of the others; where samples
are compared with each other, `columns` puts its group's mean in the score's place, which prefers no sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowfleet.job.drop_reasons import DropReason
from flowfleet.job.spec import RewardPart

NON_FINITE = "non_finite_sum"
PREFERENCE = "preference"
"""The reward of a preference data set: 1 for what was chosen, 0 for what was rejected."""


@dataclass(frozen=True)
class Composed:
    """Total of one sample. `reason` is set if `total` is not."""

    total: float | None
    reason: str = ""
    gated_by: str = ""
    """The reward whose gate acted."""


@dataclass(frozen=True)
class Columns:
    """The scores of N samples as they count, by reward."""

    values: dict[str, NDArray[np.float64]]
    """(N,) clipped; 0 where a gate made the total 0; neutral where there is none."""
    present: dict[str, NDArray[np.bool_]]
    """(N,) false where there is none."""
    weights: dict[str, float]
    """At the step."""

    def with_column(self, name: str, values: Sequence[float], weight: float) -> Columns:
        """The same with another column, which every sample has."""
        return Columns(
            {**self.values, name: np.array(values, dtype=np.float64)},
            {**self.present, name: np.ones(len(values), dtype=np.bool_)},
            {**self.weights, name: weight},
        )

    def totals(self) -> NDArray[np.float64]:
        """(N,) weighted sums, comparable with each other."""
        total = np.zeros(len(next(iter(self.values.values()))))
        for name in sorted(self.values):
            total += self.weights[name] * self.values[name]
        return total


def weight_at(part: RewardPart, step: int) -> float:
    """The weight times its curve at a step: linear between the curve's points, constant before and after."""
    if not part.curve:
        return part.weight
    if step <= part.curve[0][0]:
        return part.weight * part.curve[0][1]
    for (start, before), (end, after) in itertools.pairwise(part.curve):
        if step < end:
            return part.weight * (before + (after - before) * (step - start) / (end - start))
    return part.weight * part.curve[-1][1]


def clipped(part: RewardPart, score: float) -> float:
    """A raw score within the reward's limits."""
    return score if part.clip is None else min(max(score, part.clip[0]), part.clip[1])


def gate_of(rewards: Mapping[str, RewardPart], scores: Mapping[str, float]) -> str:
    """The reward whose gate acts on raw scores, "" for none; one that masks goes before one that zeroes, then by
    name."""
    shut = [
        (part.gate.action != "mask", name)
        for name, part in rewards.items()
        if part.gate is not None and name in scores and part.gate.shut(scores[name])
    ]
    return min(shut)[1] if shut else ""


def compose(rewards: Mapping[str, RewardPart], step: int, scores: Mapping[str, float]) -> Composed:
    """The total of a sample from its raw scores, finite numbers; rewards that are not in `scores` were skipped.

    None of it, and `gated_NAME`, for a sample that a gate masks; `no_score_NAME` where every reward that has weight at
    this step was skipped; `non_finite_sum` for an overflow.
    """
    if gate := gate_of(rewards, scores):
        part = rewards[gate].gate
        is_masked = part is not None and part.action == "mask"
        return Composed(None, DropReason.GATED.of(gate), gate) if is_masked else Composed(0.0, gated_by=gate)
    weighty = [name for name in sorted(rewards) if weight_at(rewards[name], step)]
    if weighty and not any(name in scores for name in weighty):
        return Composed(None, DropReason.NO_SCORE.of(weighty[0]))
    total = 0.0
    for name in sorted(scores.keys() & rewards.keys()):
        total += weight_at(rewards[name], step) * clipped(rewards[name], scores[name])
    return Composed(total) if math.isfinite(total) else Composed(None, NON_FINITE)


def columns(
    rewards: Mapping[str, RewardPart],
    step: int,
    scores: Sequence[Mapping[str, float]],
    group_ids: Sequence[Hashable],
) -> Columns:
    """The raw scores of a step's samples as they count at that step. `scores` and `group_ids`: one a sample, N ≥ 1.

    Where a reward gave none, the value is the mean of those that the sample's group has, else that of the step's, else
    0 throughout.
    """
    zeroed = np.array([bool(gate_of(rewards, one)) for one in scores])
    values, present = {}, {}
    for name, part in rewards.items():
        present[name] = np.array([name in one for one in scores]) | zeroed
        column = np.array([clipped(part, one.get(name, 0.0)) for one in scores], dtype=np.float64)
        values[name] = _neutral(np.where(zeroed, 0.0, column), present[name], group_ids)
    return Columns(values, present, {name: weight_at(part, step) for name, part in rewards.items()})


def _neutral(
    column: NDArray[np.float64], present: NDArray[np.bool_], group_ids: Sequence[Hashable]
) -> NDArray[np.float64]:
    if present.all():
        return column
    if not present.any():
        return np.zeros_like(column)
    filled = np.where(present, column, column[present].mean())
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    for rows in map(np.array, members.values()):
        if present[rows].any():
            filled[rows[~present[rows]]] = column[rows[present[rows]]].mean()
    return filled
