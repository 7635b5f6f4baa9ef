"""Wraps another project's library for a scorer: imports it, averages pictures' scores."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowfleet.extras import pip_install
from services.reward.scorer import Outcome, Problem, Score, mean_score


def library(module: str, scorer: str) -> Any:
    """The imported module. ValueError names the extra that has it, `reward-` and the scorer's name."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = f"reward-{scorer.replace('_', '-')}"
        raise ValueError(f"scorer {scorer} needs the library ({error}): {pip_install(extra)}") from error


def of_samples(found: Sequence[Outcome], lengths: Sequence[int]) -> list[Outcome]:
    """Returns per sample the mean of its next `lengths` pictures' outcomes, or the first problem."""
    ends = np.cumsum(lengths)
    return [_of_sample(found[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def _of_sample(found: Sequence[Outcome]) -> Outcome:
    scores = [one for one in found if isinstance(one, Score)]
    return mean_score(scores) if len(scores) == len(found) else next(one for one in found if isinstance(one, Problem))
