"""Losses of policies that write tokens: from the log-probs of tokens and advantages to one loss a sequence.

Like losses.py, which is of flows: losses come back as (B,), not reduced, and the trainer divides their sum by the
number of sequences that an update has on all ranks. `SequenceRows.divisors` says how a sequence's tokens are counted,
so that a mean over all tokens of the update needs no other code than a mean over each sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowfleet.algorithms.losses import Limits, LossOutput, beyond, clipped, ratio_stats

Aggregation = Literal["sequence", "token"]


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """N tokens that the policy wrote, of B sequences one behind the other."""

    log_prob: Tensor
    """(N,) of the current policy, with gradient."""
    old_log_prob: Tensor
    """(N,) of the policy before this update."""
    advantages: Tensor
    """(B,)"""
    owners: Tensor
    """(N,) int64: the sequence of each token."""
    divisors: Tensor
    """(B,) what a sum over a sequence's tokens is divided by; see `divisors`."""
    weights: Tensor | None = None
    """(N,) importance weights of `correction`; treated as constants."""

    def mean(self, values: Tensor) -> Tensor:
        """(B,): mean of (N,) values over each sequence's tokens."""
        return self._sum(values) / self._sum(torch.ones_like(values))

    def aggregated(self, values: Tensor) -> Tensor:
        """(B,): sum of (N,) values over each sequence's tokens, divided by its divisor."""
        return self._sum(values) / self.divisors

    def _sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(len(self.advantages)).index_add(0, self.owners, values)


SequenceLoss = Callable[[SequenceRows, Limits], LossOutput]
"""Computes the loss of B sequences, all on one device."""


def divisors(lengths: Tensor, aggregation: Aggregation, mean_length: float) -> Tensor:
    """(B,) float32. sequence: the tokens of each, so that a sequence counts for one. token: `mean_length`, the mean of
    the update's sequences on all ranks, so that the mean over sequences is that over all their tokens.

    Args:
        lengths: (B,) trained tokens of each sequence.
        aggregation: the job's.
        mean_length: trained tokens of the update divided by its sequences.
    """
    own = lengths.float()
    return own if aggregation == "sequence" else torch.full_like(own, mean_length)


def gspo(rows: SequenceRows, limits: Limits) -> LossOutput:
    """GSPO, https://arxiv.org/abs/2507.18071: the clipped surrogate of PPO on the ratio of a sequence.

    s = exp(mean over the tokens of (log_prob - old_log_prob)) and loss = weight * max(-A s, -A clip(s, 1 - c_low, 1 +
    c)). Its weight is the mean of its tokens', which a correction at the level of sequences has made equal.

    Args:
        rows: uses all but `divisors`.
        limits: uses `clip_range` and `clip_range_low`, published as 4e-4 and 3e-4.
    """
    log_ratio = rows.mean(rows.log_prob - rows.old_log_prob.detach())
    loss = clipped(log_ratio, rows.advantages, limits)
    if rows.weights is not None:
        loss = loss * rows.mean(rows.weights.detach())
    return LossOutput(loss, ratio_stats(log_ratio, *beyond(log_ratio, limits)))


def grpo(rows: SequenceRows, limits: Limits) -> LossOutput:
    """GRPO, https://arxiv.org/abs/2402.03300, and with unequal limits and a mean over all tokens DAPO,
    https://arxiv.org/abs/2503.14476: the clipped surrogate of PPO on the ratio of each token.

    rho = exp(log_prob - old_log_prob); a token's loss is weight * max(-A rho, -A clip(rho, 1 - c_low, 1 + c)), and a
    sequence's is their sum divided by its divisor.

    Args:
        rows: uses all.
        limits: uses `clip_range` and `clip_range_low`.
    """
    log_ratio = rows.log_prob - rows.old_log_prob.detach()
    losses = clipped(log_ratio, rows.advantages[rows.owners], limits)
    if rows.weights is not None:
        losses = losses * rows.weights.detach()
    return LossOutput(rows.aggregated(losses), ratio_stats(log_ratio, *beyond(log_ratio, limits)))


def reference_kl_k3(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """(N,) with gradient: exp(d) - d - 1 with d = reference_log_prob - log_prob, an estimate of the KL to the reference
    that is never negative (Schulman's k3, as in GRPO)."""
    gap = reference_log_prob.detach() - log_prob
    return gap.expm1() - gap
