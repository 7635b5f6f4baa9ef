"""Policy losses: from log-probabilities and advantages to one loss a row, not reduced.

A row is one (sample, step) pair. Losses come back as (B,), because only the trainer knows how many rows the global
batch has: it divides the sum by that, so a row that a loss masks stays in the denominator. Statistics come back as sums
and extremes (`RatioStats`) that add up over micro-batches and ranks without loss. Every loss has the signature
`PolicyLoss`; what a loss does not need of `PolicyRows` may be None. Advantages are clamped once, where they are made
(flowfleet/algorithms/advantages.py). Jobs find losses by name in `flowfleet.algorithms.registry`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowfleet.algorithms.settings import LossSettings, NatsSettings, TrustRegionSettings


@dataclass(frozen=True, slots=True)
class Limits:
    """How far one update may move from the old policy, per element of a sample's latents."""

    clip_range: float
    """c: the ratio counts up to 1 + c."""
    kl_threshold: float = TrustRegionSettings().kl_threshold
    """Limit on one step's KL, averaged over its elements."""
    clip_range_low: float | None = None
    """The ratio counts from 1 minus this on; None: 1 - c."""
    settings: LossSettings = field(default_factory=LossSettings)
    """Further settings of the job's loss, as `limits.settings.of(MySettings).delta`."""

    @property
    def log_low(self) -> float:
        """The least log-ratio that counts, below 0; a range of 1 lets every ratio count."""
        low = self.clip_range if self.clip_range_low is None else self.clip_range_low
        return math.log1p(-low) if low < 1 else -math.inf

    @property
    def log_high(self) -> float:
        """The greatest log-ratio that counts."""
        return math.log1p(self.clip_range)


def limits(part: LossSettings, num_elements: int) -> Limits:
    """The limits of a job for samples of `num_elements` latent elements; those in nats are divided among them.

    Raises ValueError for so many nats an element that nothing would be clipped.
    """
    clip = part.of(NatsSettings)
    clip_range = clip.clip_range if clip.clip_nats is None else clip_range_from_nats(clip.clip_nats, num_elements)
    return Limits(clip_range, part.of(TrustRegionSettings).kl_threshold, clip.clip_range_low, part)


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """Inputs of losses of the Flow-GRPO family, B rows. Log-probs may be of a wider dtype than the rest."""

    log_prob: Tensor
    """(B,) of the current policy, with gradient; a mean over elements."""
    old_log_prob: Tensor
    """(B,) of the policy before this update."""
    advantages: Tensor
    """(B,)"""
    weights: Tensor | None = None
    """(B,) importance weights of `correction`; treated as constants."""
    mean: Tensor | None = None
    """(B, ...) of the current policy's step, with gradient."""
    old_mean: Tensor | None = None
    """(B, ...) of the old policy's step."""
    std: Tensor | None = None
    """(B,) of the whole step; 0 where a step has no noise."""
    dt: Tensor | None = None
    """(B,) sigma_next - sigma of the step, below 0."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Losses of a micro-batch and how far its ratios are from 1."""

    loss: Tensor
    """(B,) with gradient."""
    stats: RatioStats


@dataclass(frozen=True, slots=True)
class RatioStats:
    """Sums over rows and extremes of a loss's ratio rho, for adding up over micro-batches and ranks.

    Sums are taken of rho - 1, so that float32 keeps ratios that differ from 1 by 1e-5.
    """

    sums: Tensor
    """(6,): rows, rho - 1, (rho - 1)^2, rows beyond the limit with rho above 1, the same below 1,
    (log_prob - old_log_prob)^2 / 2. Adds up."""
    extremes: Tensor
    """(2,): greatest of -(rho - 1) and of rho - 1. Combines by maximum."""

    def __add__(self, other: RatioStats) -> RatioStats:
        return RatioStats(self.sums + other.sums, torch.maximum(self.extremes, other.extremes))

    def metrics(self) -> dict[str, float]:
        """The charted names. `pg_clipfrac` is the share of rows outside the clip range, or masked by Flow-DPPO;
        `ppo_kl` the mean of half the squared log-ratio, an estimate of the KL that is never negative."""
        rows, total, squares, higher, lower, kl = self.sums.double().tolist()
        below, above = self.extremes.double().tolist()
        if rows == 0:
            return {}
        mean = total / rows
        return {
            "actor/ratio_mean": 1 + mean,
            "actor/ratio_std": math.sqrt(max(0.0, squares / rows - mean**2)),
            "actor/ratio_min": 1 - below,
            "actor/ratio_max": 1 + above,
            "actor/pg_clipfrac": (higher + lower) / rows,
            "actor/pg_clipfrac_higher": higher / rows,
            "actor/pg_clipfrac_lower": lower / rows,
            "actor/ppo_kl": kl / rows,
        }


PolicyLoss = Callable[[PolicyRows, Limits], LossOutput]
"""Computes the loss of B rows, all on one device."""


def flow_grpo(rows: PolicyRows, limits: Limits) -> LossOutput:
    """Flow-GRPO, https://arxiv.org/abs/2505.05470: the clipped surrogate of PPO on the ratio of mean log-probabilities.

    loss = weight * max(-A rho, -A clip(rho, 1 - c_low, 1 + c)) with rho = exp(log_prob - old_log_prob).

    Args:
        rows: uses `log_prob`, `old_log_prob`, `advantages` and `weights`.
        limits: uses `clip_range` and `clip_range_low`; see `clip_range_from_nats`.
    """
    log_ratio = rows.log_prob - rows.old_log_prob.detach()
    loss = _weighted(clipped(log_ratio, rows.advantages, limits), rows)
    return LossOutput(loss, ratio_stats(log_ratio, *beyond(log_ratio, limits)))


def grpo_guard(rows: PolicyRows, limits: Limits) -> LossOutput:
    """GRPO-Guard, https://arxiv.org/abs/2510.22319: ratios that are centered and of equal spread at every noise level.

    With s the step std and b = mean((mu - mu_old)^2) / (2 s^2), the normalized ratio is
    rho = exp((log_prob - old_log_prob + b) s), and loss = weight * max(-A rho, -A clip(rho, 1 - c_low, 1 + c)) / -dt.
    For a sample x' = mu_old + s e the exponent is mean(e (mu - mu_old)): the plain ratio's drift of -b is gone, and no
    step's ratio is blown up by a small s. Dividing by -dt evens out the gradients of the steps.

    The authors' code averages s and -dt over the batch, and b too: it reduces b over the dimensions that the (B,)
    log-probs have beyond the first, which are none, and PyTorch takes that as all. Rows with other windows or other
    drift then get each other's scale. Here all three belong to their row.

    Args:
        rows: uses all; `log_prob` must be Gaussian, so not of `cps`. A row with std 0 has ratio 1 and no gradient.
        limits: uses `clip_range` and `clip_range_low`, here of the normalized ratio.
    """
    assert rows.dt is not None
    assert rows.std is not None
    log_ratio = rows.log_prob - rows.old_log_prob.detach()
    normalized = (log_ratio + _drift(rows)) * rows.std
    loss = _weighted(clipped(normalized, rows.advantages, limits) / -rows.dt, rows)
    return LossOutput(loss, ratio_stats(normalized, *beyond(normalized, limits), raw=log_ratio))


def flow_dppo(rows: PolicyRows, limits: Limits) -> LossOutput:
    """Flow-DPPO, https://arxiv.org/abs/2606.11025: a trust region by the exact KL of a step in place of clipped ratios.

    loss = weight * (-A rho), but 0 in masked rows. A row is masked if mean((mu - mu_old)^2) / (2 std^2) is at least
    the threshold and its update would move it further from the old policy: A > 0 and rho > 1, or A < 0 and rho < 1. A
    row that moves back, or has rho = 1 or A = 0, is kept however far it is.

    Args:
        rows: uses all but `dt`. A row with std 0 has no density, so no KL, and is never masked.
        limits: uses `kl_threshold`.
    """
    log_ratio = rows.log_prob - rows.old_log_prob.detach()
    advantages = rows.advantages.detach()
    is_far = _drift(rows).detach() >= limits.kl_threshold
    higher = is_far & (advantages > 0) & (log_ratio > 0)
    lower = is_far & (advantages < 0) & (log_ratio < 0)
    is_masked = higher | lower
    ratio = torch.where(is_masked, 0.0, log_ratio).exp()  # no masked ratio overflows on its way to 0
    loss = _weighted(torch.where(is_masked, 0.0, -advantages * ratio), rows)
    return LossOutput(loss, ratio_stats(log_ratio, higher, lower))


def reference_kl(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """KL divergence (B,) of two steps with equal std, averaged over elements: mean((mu - mu_ref)^2) / (2 std^2).

    Args:
        mean: (B, ...) of the current policy, with gradient.
        reference_mean: (B, ...) of the reference policy.
        std: (B,) of the whole step. A row with std 0, which has no density, gives 0.
    """
    squared = (mean - reference_mean.detach()).square().flatten(1).mean(dim=1)
    safe_std = torch.where(std > 0, std, torch.inf)
    return squared / (2 * safe_std.square())


def clip_range_from_nats(nats: float, num_elements: int) -> float:
    """The clip range c of the per-element ratio at which the joint ratio of a sample is e^nats: c = e^(nats / D) - 1.

    One setting in nats serves all resolutions: c = 1e-5 of Qwen-Image at 512x512 (D = 65,536) is 0.66 nats.

    Args:
        nats: bound on the log of the joint ratio, above 0.
        num_elements: D, elements of a sample's latents.

    Raises:
        ValueError: nats or num_elements not above 0, or so many nats an element that nothing would be clipped.
    """
    if not (nats > 0 and num_elements > 0):
        raise ValueError(f"the clip range needs nats and elements above 0, but got {nats} nats and {num_elements}")
    clip_range = math.expm1(nats / num_elements)
    if clip_range >= 1:
        raise ValueError(f"{nats} nats over {num_elements} elements clip nothing: lower clip_nats")
    return clip_range


def ratio_stats(log_ratio: Tensor, higher: Tensor, lower: Tensor, *, raw: Tensor | None = None) -> RatioStats:
    """Statistics of B rows, without gradient, on their device.

    Args:
        log_ratio: (B,) logarithm of the ratio that the loss limits.
        higher, lower: (B,) bool, rows beyond the limit by a ratio above or below 1.
        raw: (B,) log_prob - old_log_prob, where that is not `log_ratio`.
    """
    log_ratio = log_ratio.detach()
    excess = log_ratio.expm1()
    terms = (
        torch.ones_like(excess),
        excess,
        excess.square(),
        higher.to(excess),
        lower.to(excess),
        (log_ratio if raw is None else raw.detach()).square() / 2,
    )
    return RatioStats(torch.stack([term.sum() for term in terms]), torch.stack([-excess.min(), excess.max()]))


def _drift(rows: PolicyRows) -> Tensor:
    """KL of the current step to the old one, (B,) with gradient."""
    assert rows.mean is not None
    assert rows.old_mean is not None
    assert rows.std is not None
    return reference_kl(rows.mean, rows.old_mean, rows.std)


def clipped(log_ratio: Tensor, advantages: Tensor, limits: Limits) -> Tensor:
    """PPO's surrogate, (B,): the worse of the ratio's and the clipped ratio's loss.

    That is the ratio cut off on the side where it would gain. The logarithm is cut, because float32 has no ratio
    between 1 and 1 + 1.2e-7, and a video's clip range is below that.
    """
    advantages = advantages.detach()
    cut = torch.where(advantages >= 0, log_ratio.clamp(max=limits.log_high), log_ratio.clamp(min=limits.log_low))
    return -advantages * cut.exp()


def beyond(log_ratio: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """(B,) bool each: rows with a ratio above the clip range, and below it."""
    log_ratio = log_ratio.detach()
    return log_ratio > limits.log_high, log_ratio < limits.log_low


def _weighted(loss: Tensor, rows: PolicyRows) -> Tensor:
    return loss if rows.weights is None else loss * rows.weights.detach()
