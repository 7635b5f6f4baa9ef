"""Rollout correction: what to do about samples drawn by another policy, or another engine, than the trainer's.

Engines differ by about 3e-5 in mean log-probability, more than the usual clip range, so by default the trainer
recomputes the old log-probabilities itself and the ratio of the loss starts at exactly 1 (`none`: no weight). Where
they differ by more, or samples are stale, rows are weighed or left out by the ratio of the trainer to the rollout:
`truncated` is truncated importance sampling (Ionides 2008, doi:10.1198/106186008X320456), `band` also drops what lies
outside two bounds, `rejection` only drops. A row that is left out stays in the denominator of the mean.

The ratio is that of a row, or with `level = "sequence"` that of a sample, which all its noisy steps share. verl has the
same choices for language models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flowfleet.process.telemetry import LOG_PROB_GAP

if TYPE_CHECKING:
    from flowfleet.algorithms.losses import Limits
    from flowfleet.algorithms.settings import CorrectionPart

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to [-20, 20] before the exponential, so that no weight overflows."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights for a loss, and how far trainer and rollout are apart. Nothing here has a gradient."""

    weights: Tensor | None
    """(..., B) constants, or None for no weight."""
    log_ratio: Tensor
    """(..., B) of the ratio that was judged, cut to +-20; 0 everywhere means exact agreement."""
    outside: Tensor
    """(..., B) bool: rows whose weight was truncated (`truncated`) or that were left out (`band`, `rejection`)."""

    def sums(self) -> dict[str, Tensor]:
        """Charted name to its 0-d sum over the rows: a share and a mean once divided by the number of rows."""
        ones = torch.ones_like(self.log_ratio)
        weights = ones if self.weights is None else self.weights
        return {"rollout_corr/outside": (ones * self.outside).sum(), "rollout_corr/weight_mean": weights.sum()}


def correct(part: CorrectionPart, old_log_prob: Tensor, rollout_log_prob: Tensor, *, bypass: bool) -> Correction:
    """Weights of rows drawn with `rollout_log_prob`.

    With the ratio r = exp(old_log_prob - rollout_log_prob), a geometric mean over the elements of a sample and, with
    the level `sequence`, over its steps as well:

    - none: no weight.
    - truncated: min(high, r).
    - band: r where low <= r <= high, else 0.
    - rejection: 1 where low <= r <= high, else 0.

    Bypassing, the loss's own ratio is against the rollout and already holds r, so the weight is what is left to do:
    truncated min(high, r) / r, band and rejection 1 or 0.

    Args:
        part: mode, level, low, high.
        old_log_prob: (B,) by the trainer, under the policy before this update; bypassing, under the current one. (W, B)
            with the level `sequence`: all noisy steps of each sample.
        rollout_log_prob: of the same shape, as stored by the rollout.
        bypass: whether the loss takes `rollout_log_prob` for the old policy's.
    """
    gap = (old_log_prob - rollout_log_prob).detach()
    if part.level == "sequence":
        assert gap.dim() == 2
        gap = gap.mean(0).expand_as(gap)
    log_ratio = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    if part.mode == "none":
        return Correction(None, log_ratio, torch.zeros_like(ratio, dtype=torch.bool))
    if part.mode == "truncated":
        truncated = ratio.clamp(max=part.high)
        return Correction(truncated / ratio if bypass else truncated, log_ratio, ratio > part.high)
    outside = (ratio < part.low) | (ratio > part.high)
    kept = ratio if part.mode == "band" and not bypass else torch.ones_like(ratio)
    return Correction(kept.masked_fill(outside, 0.0), log_ratio, outside)


def agreement_metrics(log_ratio: Tensor, limits: Limits | None = None) -> dict[str, float]:
    """Charted names for (B,) log-ratios of trainer over rollout. `limits`: of a loss that clips; rows whose ratio is
    beyond them would be clipped at once were the rollout's log-probs the old ones."""
    gap = log_ratio.detach().double().cpu()
    metrics = {
        "rollout_corr/ratio_mean": gap.exp().mean().item(),
        LOG_PROB_GAP: gap.abs().mean().item(),
        "rollout_corr/log_ratio_abs_p99": float(np.percentile(gap.abs().numpy(), 99)),
        "rollout_corr/log_ratio_abs_max": gap.abs().max().item(),
        "rollout_corr/exact": (gap == 0).double().mean().item(),
    }
    if limits is not None:
        is_beyond = (gap > limits.log_high) | (gap < limits.log_low)
        metrics["rollout_corr/beyond_clip"] = is_beyond.double().mean().item()
    return metrics
