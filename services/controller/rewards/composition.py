"""From the raw scores of a sample to what it counts for. Pure.

    raw score ── gate ──► masked, or a total of 0
        └─ clip ─► × weight × curve(step) ─► summed: the total

A reward without a score does not count as zero, whether it was skipped (`on_failure = "skip"`) or does not score the
sample's source. The total is that of the others; where samples are compared with each other, `weighted_total` puts in
the score's place what prefers no sample.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowfleet.algorithms.advantages import weighted_total
from flowfleet.job.drop_reasons import NON_FINITE_SUM, DropReason
from flowfleet.job.part import factor_at
from flowfleet.job.spec import RewardPart

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
    """(N,) clipped; 0 where a gate made the total 0, and where there is none."""
    present: dict[str, NDArray[np.bool_]]
    """(N,) false where there is none."""
    weights: dict[str, NDArray[np.float64]]
    """(N,) at the step, as the sample's source has them."""
    group_ids: Sequence[Hashable]
    """N groups."""

    def with_column(self, name: str, values: Sequence[float], weight: float) -> Columns:
        """The same with another column, which every sample has."""
        return Columns(
            {**self.values, name: np.array(values, dtype=np.float64)},
            {**self.present, name: np.ones(len(values), dtype=np.bool_)},
            {**self.weights, name: np.full(len(values), weight)},
            self.group_ids,
        )

    def totals(self) -> NDArray[np.float64]:
        """(N,) weighted sums, comparable with each other."""
        return weighted_total(self.values, self.weights, self.group_ids, self.present)


def weight_at(part: RewardPart, step: int) -> float:
    """The weight times its curve at a step."""
    return part.weight * factor_at(part.curve, step)


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
    return Composed(total) if math.isfinite(total) else Composed(None, NON_FINITE_SUM)


def columns(
    sources: Sequence[Mapping[str, RewardPart]],
    source_of: NDArray[np.int64],
    step: int,
    scores: Sequence[Mapping[str, float]],
    group_ids: Sequence[Hashable],
) -> Columns:
    """The raw scores of a step's samples as they count at that step.

    `sources`: rewards of each source of prompts; `source_of`: (N,) number of each sample's. `scores` and `group_ids`:
    one a sample, N ≥ 1.
    """
    zeroed = np.array([bool(gate_of(sources[k], one)) for k, one in zip(source_of.tolist(), scores, strict=True)])
    values, present, weights = {}, {}, {}
    for name, part in {name: part for rewards in sources for name, part in rewards.items()}.items():
        is_scored = np.array([name in rewards for rewards in sources])[source_of]
        present[name] = is_scored & (np.array([name in one for one in scores]) | zeroed)
        column = np.array([clipped(part, one.get(name, 0.0)) for one in scores], dtype=np.float64)
        values[name] = np.where(zeroed | ~present[name], 0.0, column)
        of_source = [weight_at(rewards[name], step) if name in rewards else 0.0 for rewards in sources]
        weights[name] = np.array(of_source)[source_of]
    return Columns(values, present, weights, group_ids)
