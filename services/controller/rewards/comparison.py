"""Compares a shadow with its reward by their scores of the same samples. Pure.

distribution   mean, standard deviation (ddof 0) and quantiles (linear interpolation) of either
spearman       Pearson's correlation of the ranks over all samples; equal scores share their mean rank
agreement      over all pairs of samples of a group that at least one of the two puts in an order: the share on whose
               order both agree. A pair that only one of them orders counts half, so that a shadow that knows
               nothing is at 0.5; pairs that both find equal are not counted
zero_std       share of groups of two or more whose scores are all equal: such a group teaches nothing
latency        of the calls, in seconds, as the controller sees them
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowfleet.api.answers import Answer, FiniteOrNone
from flowfleet.api.rewards import Comparison, Distribution
from flowfleet.ranks import ranks

Floats = NDArray[np.float64]
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class GroupScores(Answer):
    """The samples of one group (a held-out sample is a group of its own) that both rewards scored."""

    step: int
    group: int
    active: list[float]
    shadow: list[float]
    failed: int = 0
    """Samples that the active reward scored and the shadow did not."""
    active_s: FiniteOrNone = None
    """Seconds of the longest call that the active reward needed for the group."""
    shadow_s: FiniteOrNone = None
    active_version: str = ""
    shadow_version: str = ""
    """Scorer and version, as the services gave them."""


def compare(groups: Sequence[GroupScores]) -> Comparison:
    """Compares the given groups, each once. The result's bits do not depend on their order."""
    groups = sorted(groups, key=lambda group: (group.step, group.group))
    active = np.array([score for group in groups for score in group.active], dtype=np.float64)
    shadow = np.array([score for group in groups for score in group.shadow], dtype=np.float64)
    return Comparison(
        samples=len(active),
        groups=len(groups),
        failed=sum(group.failed for group in groups),
        first_step=groups[0].step if groups else None,
        last_step=groups[-1].step if groups else None,
        active=_distribution(groups, active, "active"),
        shadow=_distribution(groups, shadow, "shadow"),
        spearman=spearman(active, shadow),
        agreement=agreement(groups),
    )


def spearman(left: Floats, right: Floats) -> float | None:
    """Spearman's correlation of two arrays of one length; None where it is not defined."""
    if len(left) < 2 or np.ptp(left) == 0 or np.ptp(right) == 0:
        return None
    first, second = (ranks(values) - (len(values) + 1) / 2 for values in (left, right))
    return float((first @ second) / math.sqrt((first @ first) * (second @ second)))


def agreement(groups: Sequence[GroupScores]) -> float | None:
    """Agreement as defined in the module's docstring; None without a pair."""
    agreed = counted = 0.0
    for group in groups:
        active, shadow = _order(group.active), _order(group.shadow)
        ordered = (active != 0) | (shadow != 0)
        counted += float(ordered.sum())
        agreed += float(((1 + active * shadow) / 2)[ordered].sum())
    return agreed / counted if counted else None


def _order(scores: Sequence[float]) -> Floats:
    """-1, 0 or 1 of each pair of samples."""
    values = np.asarray(scores, dtype=np.float64)
    first, second = np.triu_indices(len(values), 1)
    return np.sign(values[second] - values[first])


def _distribution(groups: Sequence[GroupScores], scores: Floats, side: str) -> Distribution:
    latencies = np.array([s for group in groups if (s := getattr(group, f"{side}_s")) is not None])
    versions = sorted({version for group in groups if (version := getattr(group, f"{side}_version"))})
    found: dict[str, Any] = {"versions": versions, "zero_std_ratio": _zero_std([getattr(g, side) for g in groups])}
    if len(latencies):
        found["latency_p50_s"], found["latency_p99_s"] = np.quantile(latencies, [0.5, 0.99])
    if len(scores):
        found |= {"mean": scores.mean(), "std": scores.std(), "min": scores.min(), "max": scores.max()}
        found |= dict(zip(("q05", "q25", "q50", "q75", "q95"), np.quantile(scores, QUANTILES), strict=True))
    return Distribution(**found)


def _zero_std(groups: Sequence[Sequence[float]]) -> float | None:
    several = [scores for scores in groups if len(scores) > 1]
    return sum(max(scores) == min(scores) for scores in several) / len(several) if several else None
