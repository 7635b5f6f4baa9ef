"""Evaluates a batch of `ScoreWithGradient` with the scorer of this process: scores and checks it, and scores each
sample alone if the batch fails.

A sample on which the scorer raises, and a score or gradient that is not finite, become that sample's `Problem`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from flowfleet.rewards.gradients import PixelInput
from services.reward.execution.evaluator import FAILED, Evaluator, finite
from services.reward.scorer import GradientOutcome, Params, Problem, Score, Scorer

log = logging.getLogger(__name__)


def evaluate_gradients(
    evaluator: Evaluator[Params], samples: Sequence[PixelInput], params: Params
) -> list[GradientOutcome]:
    """Returns one outcome per sample, in order."""
    scorer = evaluator.scorer
    with evaluator.pulse.work("gradient", len(samples)):
        try:
            return _checked(scorer, samples, params)
        except Exception:
            log.exception("scorer %s failed on %d gradients; scoring one by one", scorer.name, len(samples))
        outcomes: list[GradientOutcome] = []
        for sample in samples:
            outcomes += _alone(scorer, sample, params)
            evaluator.pulse.beat()
        return outcomes


def _alone(scorer: Scorer[Params], sample: PixelInput, params: Params) -> list[GradientOutcome]:
    try:
        return _checked(scorer, [sample], params)
    except Exception as error:
        return [Problem(FAILED, f"scorer {scorer.name} failed on this sample: {type(error).__name__}")]


def _checked(scorer: Scorer[Params], samples: Sequence[PixelInput], params: Params) -> list[GradientOutcome]:
    outcomes = scorer.score_with_gradient(samples, params)
    if len(outcomes) != len(samples):
        raise RuntimeError(f"{len(outcomes)} outcomes for {len(samples)} samples")
    return [_finite(sample, outcome) for sample, outcome in zip(samples, outcomes, strict=True)]


def _finite(sample: PixelInput, outcome: GradientOutcome) -> GradientOutcome:
    if isinstance(outcome, Problem):
        return outcome
    assert outcome.gradient.shape == sample.pixels.shape, "a gradient has the shape of its pixels"
    plain = finite(Score(outcome.value, outcome.components))
    if isinstance(plain, Problem):
        return plain
    if not bool(np.isfinite(outcome.gradient).all()):
        return Problem("non_finite", "the gradient has NaN or infinite elements")
    return outcome
