"""Policy losses: from log-probabilities and advantages to one loss a row, not reduced.

A row is one (sample, step) pair. Losses come back as (B,), because only the trainer knows how many rows the global
batch has: it divides the sum by that. Statistics come back as sums and extremes (`RatioStats`) that add up over
micro-batches and ranks without loss. Every loss has the signature `PolicyLoss`; what a loss does not need of
`PolicyRows` may be None.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """What losses of the Flow-GRPO family read; all of one dtype, B rows."""

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
    """(B,) of the whole step."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Losses of a micro-batch and how far its ratios are from 1."""

    loss: Tensor
    """(B,) with gradient."""
    stats: "RatioStats"


@dataclass(frozen=True, slots=True)
class RatioStats:
    """Sums over rows and extremes of rho = exp(log_prob - old_log_prob), for adding up over micro-batches and ranks.

    Sums are taken of rho - 1, so that float32 keeps ratios that differ from 1 by 1e-5.
    """

    sums: Tensor
    """(6,): rows, rho - 1, (rho - 1)^2, rows above the clip range, rows below it, (log rho)^2 / 2. Adds up."""
    extremes: Tensor
    """(2,): greatest of -(rho - 1) and of rho - 1. Combines by maximum."""

    def __add__(self, other: "RatioStats") -> "RatioStats":
        return RatioStats(self.sums + other.sums, torch.maximum(self.extremes, other.extremes))

    def metrics(self) -> dict[str, float]:
        """The charted names. `pg_clipfrac` is the share of rows outside the clip range, `ppo_kl` the mean of half the
        squared log-ratio, an estimate of the KL that is never negative."""
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


PolicyLoss = Callable[..., LossOutput]
"""(rows: PolicyRows, *, clip_range: float, max_advantage: float) to a LossOutput."""


def flow_grpo(rows: PolicyRows, *, clip_range: float, max_advantage: float = 5.0) -> LossOutput:
    """Flow-GRPO, https://arxiv.org/abs/2505.05470: the clipped surrogate of PPO on the ratio of mean log-probabilities.

    loss = weight * max(-A rho, -A clip(rho, 1 - c, 1 + c)), A cut to [-max_advantage, max_advantage].

    Args:
        rows: uses `log_prob`, `old_log_prob`, `advantages` and `weights`.
        clip_range: c, per element of a sample; see `clip_range_from_nats`.
        max_advantage: bound on |A|.
    """
    advantages = rows.advantages.detach().clamp(-max_advantage, max_advantage)
    log_ratio = rows.log_prob - rows.old_log_prob.detach()
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))
    if rows.weights is not None:
        loss = loss * rows.weights.detach()
    return LossOutput(loss, ratio_stats(log_ratio, clip_range))


LOSSES: dict[str, PolicyLoss] = {"flow_grpo": flow_grpo}
"""Losses by the name that a job file uses."""


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


def ratio_stats(log_ratio: Tensor, clip_range: float) -> RatioStats:
    """Statistics of (B,) log-ratios, without gradient, on their device."""
    log_ratio = log_ratio.detach()
    excess = log_ratio.expm1()
    terms = (
        torch.ones_like(excess),
        excess,
        excess.square(),
        (excess > clip_range).to(excess),
        (excess < -clip_range).to(excess),
        log_ratio.square() / 2,
    )
    return RatioStats(torch.stack([term.sum() for term in terms]), torch.stack([-excess.min(), excess.max()]))
