"""Matching losses: on velocities at new noise over finished latents, so they need no log-probs and no noisy sampler.

A row is one (sample, noise level) pair: clean latents x0, a noise e and a sigma s give x_s = (1 - s) x0 + s e, at which
the right velocity is e - x0. As with the policy losses nothing is reduced: losses come back as (B,) and statistics as
sums over rows, which the trainer divides by the rows of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from flowfleet.algorithms.losses import RatioStats

if TYPE_CHECKING:
    from flowfleet.algorithms.builtin.matching import DiffusionNftSettings
    from flowfleet.algorithms.builtin.pairs import DpoSettings
    from flowfleet.algorithms.settings import OldPolicyPart

DEFAULT_CLAMP = 5.0
"""Default limit on DiffusionNFT's advantages, used where `algorithm.advantage_clamp` is null: the loss needs one."""
MIN_WEIGHT = 1e-5
"""Floor of the mean distance that a DiffusionNFT loss is divided by."""


@dataclass(frozen=True, slots=True)
class MatchingRows:
    """Inputs of a matching loss: B rows; velocities may be of another dtype than the latents, which decides."""

    clean: Tensor
    """(B, ...) finished latents x0, float32."""
    noise: Tensor
    """(B, ...) standard normal."""
    sigma: Tensor
    """(B,) in (0, 1)."""
    velocity: Tensor
    """(B, ...) of the current policy at `noisy(clean, noise, sigma)`, with gradient."""
    advantages: Tensor
    """(B,)"""
    old_velocity: Tensor | None = None
    """(B, ...) of the old policy, which sampled unless `old_policy.samples` is false."""
    reference_velocity: Tensor | None = None
    """(B, ...) of the model before training."""
    ties: Tensor | None = None
    """(B,) 1 where the distance to the reference counts, else 0; None: everywhere."""
    groups: Tensor | None = None
    """(B,) number of each row's group; whole groups, for losses that need them."""


@dataclass(frozen=True, slots=True)
class MatchingOutput:
    """Losses of a micro-batch and its charted statistics."""

    loss: Tensor
    """(B,) with gradient."""
    sums: dict[str, Tensor]
    """Metric name to its 0-d sum over the rows, without gradient."""
    ratios: RatioStats | None = None
    """Statistics of the ratio to the old policy, of losses that have one."""


MatchingLoss = Callable[[MatchingRows, Any], MatchingOutput]
"""Computes the loss of B rows, all on one device, with the job's settings."""


def noisy(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """(B, ...) x_s = (1 - s) x0 + s e: the forward process of flow matching at `sigma` (B,)."""
    scale = per_row(sigma, clean)
    return (1 - scale) * clean + scale * noise.to(clean)


def diffusion_nft(rows: MatchingRows, part: DiffusionNftSettings) -> MatchingOutput:
    """DiffusionNFT, https://arxiv.org/abs/2509.16117: towards what the better samples have and the worse ones lack.

    With the current velocity f and the old policy's o, v+ = beta f + (1 - beta) o and v- = (1 + beta) o - beta f. Each
    predicts x0 as x_s - s v, and L+, L- are mean((x0' - x0)^2) / w with the constant w = max(mean|x0' - x0|, 1e-5): so
    no noise level outweighs the others. With p = clip(A, -a, a) / (2a) + 1/2, of A what `advantage_mode` says:
    loss = a (p L+ + (1 - p) L-) / beta + kl_coef mean((f - reference)^2).

    x0' - x0 is computed as s (e - x0 - v), which is the same and loses nothing to cancellation at low sigma.

    Args:
        rows: uses all; `reference_velocity` only with `kl_coef` above 0.
        part: uses `beta`, `kl_coef`, `advantage_mode` and `advantage_clamp`, which is a (5 if it is null).
    """
    assert rows.old_velocity is not None
    target, sigma = target_velocity(rows), per_row(rows.sigma, rows.clean)
    current, old = rows.velocity.to(target), rows.old_velocity.detach().to(target)
    positive = normalized(sigma * (target - torch.lerp(old, current, part.beta)))
    negative = normalized(sigma * (target - torch.lerp(old, current, -part.beta)))
    clamp = DEFAULT_CLAMP if part.advantage_clamp is None else part.advantage_clamp
    advantages = _ADVANTAGE_MODES[part.advantage_mode](rows.advantages.detach().to(target))
    share = advantages.clamp(-clamp, clamp) / (2 * clamp) + 0.5
    loss = clamp / part.beta * (share * positive + (1 - share) * negative)
    sums = {
        "actor/nft_positive_loss": positive,
        "actor/nft_negative_loss": negative,
        "actor/old_deviation": mean_square(current - old),
    }
    loss, tie = with_reference(loss, rows, part.kl_coef)
    return MatchingOutput(loss, {name: value.detach().sum() for name, value in sums.items()} | tie)


def dpo(rows: MatchingRows, part: DpoSettings) -> MatchingOutput:
    """Diffusion-DPO, https://arxiv.org/abs/2311.12908, for flow matching: prefer the winner of each pair to the loser.

    e is the squared error of a velocity against noise - clean, its MEAN over the elements of a sample; the paper's sum
    over elements and its factor T are absorbed by beta. With d = e - e_reference of a row,
    z = -beta (d_winner - d_loser) / 2 and loss = -log sigmoid(z).

    d is computed as mean((v - v_reference) (v + v_reference - 2 (noise - clean))), which is the same: the difference of
    two float32 errors, times a beta of hundreds, would be mostly rounding as long as the policy is near the reference.

    Args:
        rows: winner, loser, winner, loser, …; the two of a pair have one noise and one sigma. Uses
            `reference_velocity`, neither `old_velocity` nor `advantages`.
        part: uses `beta`.

    Returns:
        The pair's loss on both of its rows, so that the mean over rows is the mean over pairs. `actor/dpo_accuracy`
        counts pairs with z > 0, and half of those with z = 0; `actor/dpo_margin` sums z.
    """
    assert rows.reference_velocity is not None
    assert len(rows.clean) % 2 == 0, "a pair is never split"
    target = target_velocity(rows)
    current, reference = rows.velocity.to(target), rows.reference_velocity.detach().to(target)
    excess = ((current - reference) * (current + reference - 2 * target)).flatten(1).mean(dim=1)
    margin = -0.5 * part.beta * (excess[0::2] - excess[1::2])
    loss = -functional.logsigmoid(margin)
    seen = margin.detach()
    sums = {"actor/dpo_accuracy": (seen.sign() + 1) / 2, "actor/dpo_margin": seen}
    return MatchingOutput(loss.repeat_interleave(2), {name: 2 * value.sum() for name, value in sums.items()})


def with_reference(loss: Tensor, rows: MatchingRows, weight: float | Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Adds the squared distance to the reference, times `weight` and the row's tie; and its metric."""
    if isinstance(weight, float) and weight == 0:
        return loss, {}
    assert rows.reference_velocity is not None
    distance = mean_square(rows.velocity.to(loss) - rows.reference_velocity.detach().to(loss))
    tied = distance if rows.ties is None else rows.ties.to(distance) * distance
    return loss + weight * tied, {"actor/kl_loss": distance.detach().sum()}


_ADVANTAGE_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda advantages: advantages,
    "positive": lambda advantages: advantages.clamp(min=0),
    "negative": lambda advantages: advantages.clamp(max=0),
    "sign": torch.sign,
    "positive_sign": lambda advantages: advantages.sign().clamp(min=0),
}
"""Reduces advantages (B,) by `algorithm.advantage_mode`."""


def old_policy_decay(part: OldPolicyPart, num_updates: int) -> float:
    """The share of itself that the old policy keeps when it moves after `num_updates` updates; the trained one is the
    rest.

    min(max, rate * (num_updates - delay)), and 0 until `delay`: a pure function, so a resumed job continues its
    schedule.
    """
    return min(part.max, part.rate * max(0, num_updates - part.delay))


def target_velocity(rows: MatchingRows) -> Tensor:
    """(B, ...) the velocity of the forward process, in the dtype of the clean latents."""
    return rows.noise.to(rows.clean) - rows.clean


def normalized(residual: Tensor) -> Tensor:
    """(B,) from errors (B, ...): their mean square over their mean size, which is a constant."""
    weight = residual.detach().abs().flatten(1).mean(dim=1).clamp(min=MIN_WEIGHT)
    return mean_square(residual) / weight


def mean_square(values: Tensor) -> Tensor:
    """(B,) over the elements of each row."""
    return values.square().flatten(1).mean(dim=1)


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """(B,) to a shape that broadcasts over the rows of `like`."""
    return values.to(like).reshape(-1, *[1] * (like.ndim - 1))
