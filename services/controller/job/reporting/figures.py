"""Figures of a step's rewards and advantages, made once with its request to the trainer. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from flowfleet.algorithms.advantages import AdvantageStats
from flowfleet.algorithms.settings import KlRewardSettings
from flowfleet.job.spec import JobSpec, RewardPart
from services.controller.job.credit import Credit, credits_of
from services.controller.job.machine.batch import Batch, Scored
from services.controller.prompts.mixture import Mixture
from services.controller.rewards.rows import source_rows

_NAN = float("nan")
NO_STATS = AdvantageStats(_NAN, _NAN, _NAN, _NAN, _NAN, 0.0, 0, _NAN, _NAN, _NAN)
"""Statistics of a step without a scored sample."""


def weighed(
    spec: JobSpec, rewards: Mapping[str, RewardPart], batch: Batch
) -> tuple[list[Credit], dict[str, float], dict[str, dict[str, Any]]]:
    """Computes what a step trains on, and metrics and histograms over all its samples. Samples may be many: call it in
    a thread."""
    scored = batch.scored()
    watched = rewards if spec.method.data == "prompts" else {}
    names = [source.name for source in spec.data.each]
    mixture = Mixture(spec.data.each, spec.seed, spec.rollout.prompts_per_step).of_step(batch.step).tolist()
    credits, stats = credits_of(spec, rewards, batch.step, scored) if scored else ([], NO_STATS)
    figures = {
        **_advantage_metrics(stats),
        **source_rows(
            "critic",
            spec.data,
            watched,
            [sample.scores for sample in scored],
            [sample.score for sample in scored],
            [names[mixture[sample.group]] for sample in scored],
        ),
        **_kl_metrics(spec, scored),
        "training/off_policy/trajectory_staleness/mean": _staleness(batch),
    }
    columns = {"rewards": [one.score for one in scored], "advantages": [one.advantage for one in credits]}
    return credits, figures, histograms(columns)


def _advantage_metrics(stats: AdvantageStats) -> dict[str, float]:
    names = {
        "reward_mean": "critic/rewards/mean",
        "reward_max": "critic/rewards/max",
        "reward_min": "critic/rewards/min",
        "std_mean": "critic/rewards/std_mean",
        "zero_std_ratio": "critic/rewards/zero_std_ratio",
        "group_size": "critic/rewards/group_size",
        "advantage_mean": "critic/advantages/mean",
        "advantage_max": "critic/advantages/max",
        "advantage_min": "critic/advantages/min",
    }
    values = asdict(stats)
    return {name: float(values[key]) for key, name in names.items()}


def _kl_metrics(spec: JobSpec, scored: Sequence[Scored]) -> dict[str, float]:
    if not spec.algorithm.of(KlRewardSettings).kl_reward or not scored:
        return {}
    return {"critic/reference_kl/mean": _mean([sample.reference_kl for sample in scored])}


def _staleness(batch: Batch) -> float:
    versions = [s.version for group in batch.groups.values() for s in group.values() if s.status == "scored"]
    return _mean([batch.step - version for version in versions if version is not None])


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else _NAN


NUM_BINS: Final = 32


def histogram(values: Sequence[float]) -> dict[str, Any] | None:
    """Counts of `NUM_BINS` equal bins from `low` to `high`; None without a value."""
    if not values:
        return None
    counts, edges = np.histogram(np.asarray(values, np.float64), NUM_BINS)
    return {"low": float(edges[0]), "high": float(edges[-1]), "counts": counts.tolist()}


def histograms(columns: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Name → histogram, of the columns that have values."""
    found = {name: histogram(values) for name, values in columns.items()}
    return {name: one for name, one in found.items() if one is not None}
