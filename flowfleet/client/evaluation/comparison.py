"""Compares models on the same held-out prompts and seeds: means, and changes from the first model's. Pure.

Prompts are drawn independently, a prompt's samples are not. So a standard error is that of the mean over prompts, each
with the mean of its own samples. With a single prompt it is that over its samples. A change is the mean over pairs of
samples with the same prompt and seed, which is far more precise than the difference of two means.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final

from flowfleet.api.jobs import Job
from flowfleet.api.samples import Sample

TOTAL: Final = "reward"
"""The column of the composed reward; those of single rewards have their names."""


@dataclass(frozen=True)
class Estimate:
    """A mean and how sure it is."""

    mean: float
    error: float | None
    """Standard error; None of a single value."""
    samples: int


@dataclass(frozen=True)
class Evaluated:
    """Evaluation of one model."""

    label: str
    """`base`, or the adapter as its user named it."""
    job: Job
    """The job that evaluated it."""
    samples: Sequence[Sample] = ()

    def score(self, name: str) -> Estimate | None:
        """Mean of a column; None without a score."""
        return _estimate(
            (sample.group, value) for sample in self.samples if (value := _value(sample, name)) is not None
        )

    def change(self, first: Evaluated, name: str) -> Estimate | None:
        """Mean change from another model; None without a pair."""
        known = {_key(sample): value for sample in first.samples if (value := _value(sample, name)) is not None}
        return _estimate(
            (sample.group, value - known[_key(sample)])
            for sample in self.samples
            if (value := _value(sample, name)) is not None and _key(sample) in known
        )


def columns(models: Sequence[Evaluated]) -> list[str]:
    """The composed reward, then every reward of the evaluations."""
    named = [name for model in models for name in model.job.spec["rewards"]]
    return list(dict.fromkeys([TOTAL, *named]))


def as_json(models: Sequence[Evaluated]) -> list[dict[str, Any]]:
    """A row a model; changes are from the first."""
    return [
        {
            "model": model.label,
            "job": model.job.id,
            "status": str(model.job.status),
            "reason": model.job.reason,
            "samples": len(model.samples),
            "scores": {
                name: {"score": _fields(model.score(name)), "change": _fields(model.change(models[0], name))}
                for name in columns(models)
            },
        }
        for model in models
    ]


def _fields(known: Estimate | None) -> dict[str, Any] | None:
    return None if known is None else {"mean": known.mean, "standard_error": known.error, "samples": known.samples}


def _key(sample: Sample) -> tuple[int, int, int]:
    return sample.group, sample.index, sample.seed


def _value(sample: Sample, name: str) -> float | None:
    return sample.reward if name == TOTAL else sample.scores.get(name)


def _estimate(values: Iterable[tuple[int, float]]) -> Estimate | None:
    """Makes an estimate of pairs of prompt and value."""
    prompts: dict[int, list[float]] = defaultdict(list)
    for prompt, value in values:
        prompts[prompt].append(value)
    if not prompts:
        return None
    means = [statistics.fmean(known) for known in prompts.values()]
    units = means if len(means) > 1 else next(iter(prompts.values()))
    error = statistics.stdev(units) / sqrt(len(units)) if len(units) > 1 else None
    return Estimate(statistics.fmean(means), error, sum(map(len, prompts.values())))
