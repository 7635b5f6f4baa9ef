"""Rollout correction: what to do about samples drawn by another policy, or another engine, than the trainer's.

Engines differ by about 3e-5 in mean log-probability, more than the usual clip range, so by default the trainer
recomputes the old log-probabilities itself and the ratio of the loss starts at exactly 1 (`none`: no weight).
`truncated` importance sampling (Ionides 2008, doi:10.1198/106186008X320456) weighs a row by how much likelier the old
policy finds the sample than the rollout did, at most `threshold`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

CorrectionMode = Literal["none", "truncated"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to [-20, 20] before the exponential, so that no weight overflows."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights for a loss, and how far trainer and rollout are apart."""

    weights: Tensor | None
    """(B,) constants, or None for no weight."""
    log_ratio: Tensor
    """(B,) old log-probability less the rollout's, cut to +-20; 0 everywhere means exact agreement."""


def correct(
    mode: CorrectionMode, old_log_prob: Tensor, rollout_log_prob: Tensor, *, threshold: float = 2.0
) -> Correction:
    """Importance weights of rows drawn with `rollout_log_prob`.

    Args:
        mode: `none` or `truncated`.
        old_log_prob: (B,) by the trainer, under the policy before this update.
        rollout_log_prob: (B,) as stored by the rollout.
        threshold: greatest weight of `truncated`.
    """
    if mode not in get_args(CorrectionMode):
        raise ValueError(f"unknown rollout correction {mode!r}: choose one of {', '.join(get_args(CorrectionMode))}")
    if threshold <= 0:
        raise ValueError(f"the threshold of importance weights must be above 0, but it is {threshold}")
    log_ratio = (old_log_prob - rollout_log_prob).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return Correction(log_ratio.exp().clamp(max=threshold) if mode == "truncated" else None, log_ratio)


def agreement_metrics(log_ratio: Tensor) -> dict[str, float]:
    """Charted names for (B,) log-ratios of trainer over rollout."""
    gap = log_ratio.detach().double()
    return {
        "rollout_corr/ratio_mean": gap.exp().mean().item(),
        "rollout_corr/log_ratio_abs_mean": gap.abs().mean().item(),
        "rollout_corr/log_ratio_abs_max": gap.abs().max().item(),
        "rollout_corr/exact": (gap == 0).double().mean().item(),
    }
