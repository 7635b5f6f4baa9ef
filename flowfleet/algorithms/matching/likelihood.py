"""Matching losses of policy-gradient form: the error of a velocity stands for minus the log-likelihood of a sample.

The evidence lower bound of a finished sample is a weighted matching error, so its gradient needs no noisy sampler and
no stored steps. `algorithm.likelihood` chooses the weights. Errors are means over a sample's elements, and one noise
level gives one row. Old and current policy see the same noise, which cancels most of its variance in their ratio.
"""

from collections.abc import Callable

from torch import Tensor

from flowfleet.algorithms.builtin.matching import AwmSettings, ElboPgSettings
from flowfleet.algorithms.losses import Limits, beyond, clipped, ratio_stats
from flowfleet.algorithms.matching.losses import (
    DEFAULT_CLAMP,
    MatchingOutput,
    MatchingRows,
    mean_square,
    normalized,
    per_row,
    target_velocity,
    with_reference,
)
from flowfleet.algorithms.settings import LikelihoodSettings

HUBER_POWER = 0.25
"""p of the generalized Huber error, as in all configurations of AWM's authors."""
HUBER_EPS = 1e-10


def awm(rows: MatchingRows, part: AwmSettings) -> MatchingOutput:
    """AWM, https://arxiv.org/abs/2509.25050: matching weighted by advantages, as the clipped surrogate of PPO.

    With e the error that `likelihood` names, of the current velocity f and the old policy's o: rho = exp(e_o - e_f) and
    loss = max(-A rho, -A clip(rho, 1 - c_low, 1 + c)) / a + mean((f - o)^2)
    + kl_coef mean((f - reference)^2). a is the advantage clamp.

    Args:
        rows: uses all but `groups`; `reference_velocity` only with `kl_coef` above 0.
        part: uses `likelihood`, `clip_range`, `clip_range_low`, `kl_coef` and `advantage_clamp`, which
            is a (5 if it is null).
    """
    log_prob, log_ratio = log_likelihood_ratio(rows, part)
    clamp = DEFAULT_CLAMP if part.advantage_clamp is None else part.advantage_clamp
    limits = Limits(part.clip_range, clip_range_low=part.clip_range_low)
    advantages = rows.advantages.detach().to(log_prob).clamp(-clamp, clamp) / clamp
    loss = clipped(log_ratio, advantages, limits)
    assert rows.old_velocity is not None
    distance = mean_square(rows.velocity.to(log_prob) - rows.old_velocity.detach().to(log_prob))
    loss, sums = with_reference(loss + distance, rows, part.kl_coef)
    stats = ratio_stats(log_ratio, *beyond(log_ratio, limits))
    return MatchingOutput(loss, sums | {"actor/old_deviation": distance.detach().sum()}, stats)


def elbo_pg(rows: MatchingRows, part: ElboPgSettings) -> MatchingOutput:
    """ELBO policy gradient, https://arxiv.org/abs/2602.04663: the exact (EPG) or proximal (PEPG) policy gradient.

    With e the error that `likelihood` names and the log-ratio r = e_old - e_current, which is a constant here:
    loss = exp(r) G e_current + kl_coef mean((f - reference)^2), G = A / beta - r (PEPG) or A / beta (EPG).

    -r is the gradient of beta times the KL to the old policy. The best policy under both has r = A / beta, where PEPG
    gives no gradient.

    Args:
        rows: uses all but `groups`; `reference_velocity` only with `kl_coef` above 0.
        part: uses `likelihood`, `beta`, `proximal` and `kl_coef`.
    """
    log_prob, log_ratio = log_likelihood_ratio(rows, part)
    fixed = log_ratio.detach()
    gain = rows.advantages.detach().to(log_prob) / part.beta
    if part.proximal:
        gain = gain - fixed
    loss, sums = with_reference(-fixed.exp() * gain * log_prob, rows, part.kl_coef)
    nowhere = fixed.isnan()  # no ratio is limited
    return MatchingOutput(loss, sums, ratio_stats(fixed, nowhere, nowhere))


def log_likelihood_ratio(rows: MatchingRows, part: LikelihoodSettings) -> tuple[Tensor, Tensor]:
    """Minus the current policy's error, and its log-ratio to the old policy's likelihood: (B,) each, with gradient."""
    assert rows.old_velocity is not None
    error = ERRORS[part.likelihood]
    log_prob = -error(rows, rows.velocity)
    return log_prob, log_prob + error(rows, rows.old_velocity.detach())


def _residual(rows: MatchingRows, velocity: Tensor) -> Tensor:
    target = target_velocity(rows)
    return velocity.to(target) - target


def _x0_residual(rows: MatchingRows, velocity: Tensor) -> Tensor:
    return per_row(rows.sigma, rows.clean) * _residual(rows, velocity)


def _huber(rows: MatchingRows, velocity: Tensor) -> Tensor:
    error = mean_square(_residual(rows, velocity))
    grown: Tensor = (error + HUBER_EPS) ** HUBER_POWER - HUBER_EPS**HUBER_POWER
    return rows.sigma.to(error) / HUBER_POWER * grown


ERRORS: dict[str, Callable[[MatchingRows, Tensor], Tensor]] = {
    "velocity": lambda rows, velocity: mean_square(_residual(rows, velocity)),
    "normalized_velocity": lambda rows, velocity: normalized(_residual(rows, velocity)),
    "x0": lambda rows, velocity: mean_square(_x0_residual(rows, velocity)),
    "normalized_x0": lambda rows, velocity: normalized(_x0_residual(rows, velocity)),
    "huber": _huber,
}
"""Errors (B,) of a velocity by `algorithm.likelihood`; minus one of them stands for a log-likelihood."""
