"""DPM-Solver++ of second order, https://arxiv.org/abs/2211.01095, multistep, in its midpoint form, for linear flows.

It extrapolates the finished latents that the model predicts, x0 = x - s v, from this step and the one before, so a step
costs one model call as Euler's does and the error falls with the square of the step size. With l(s) = log((1 - s) / s):

    x' = x + v (s' - s) + 1/2 (1 - s'/s) (l(s') - l(s)) / (l(s) - l(s_before)) (x0 - x0_before)

That is Euler's step and a correction. The correction is 0 in the first step, in the second of a schedule that begins at
sigma 1 (l is minus infinity there), and it is left out in the step to sigma 0, where l is infinite: first order, as in
diffusers' scheduler. There is no log-probability.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flowfleet.algorithms.sde import ode_step


@dataclass(frozen=True, slots=True)
class Prediction:
    """The finished latents as the model saw them at one noise level."""

    x0: Tensor
    """(B, ...) in the dtype of the latents."""
    sigma: float


def predict(latents: Tensor, velocity: Tensor, sigma: float) -> Prediction:
    """The base of the next extrapolation of second order; every step must make one, noisy or not."""
    return Prediction(latents - sigma * velocity.to(latents.dtype), sigma)


def dpm_solver_2_step(
    latents: Tensor, velocity: Tensor, sigma_next: float, now: Prediction, before: Prediction | None
) -> Tensor:
    """The sample at `sigma_next`.

    Args:
        latents: (B, ...) float32 or float64, the sample at `now.sigma`.
        velocity: (B, ...) of any float dtype, the model's dx/dsigma there.
        sigma_next: in [0, now.sigma).
        now: `predict` of this step.
        before: `predict` of the step before; None in the first.
    """
    moved = ode_step(latents, velocity, now.sigma, sigma_next)
    scale = _correction(sigma_next, now.sigma, None if before is None else before.sigma)
    return moved if before is None or scale == 0 else moved + scale * (now.x0 - before.x0)


def tail_sigmas(sigma: float, time: float, num_steps: int) -> Tensor:
    """(num_steps + 1,) float32 noise levels from `sigma` to 0, evenly spaced before the schedule's shift.

    A shift k maps the time u to k u / (1 + (k - 1) u). The one that leads `time` to `sigma` maps the even times down to
    0. So MixGRPO-Flash spaces the steps after its window, and a schedule without a stretched end stays on its curve.

    Args:
        sigma: the level at which the tail starts, in (0, 1).
        time: where that lies in the schedule before its shift: the share of its steps that are left, in (0, 1).
        num_steps: at least 1.
    """
    shift = sigma * (1 - time) / (time * (1 - sigma))
    times = torch.linspace(time, 0, num_steps + 1, dtype=torch.float64)
    sigmas = (shift * times / (1 + (shift - 1) * times)).float()
    sigmas[0] = sigma
    return sigmas


def _correction(sigma_next: float, sigma: float, sigma_before: float | None) -> float:
    """Scale of the difference of the predictions; 0 for a step of first order."""
    if sigma_before is None or sigma_before == 1 or sigma_next == 0:
        return 0.0
    ratio = (_log_snr(sigma_next) - _log_snr(sigma)) / (_log_snr(sigma) - _log_snr(sigma_before))
    return 0.5 * (1 - sigma_next / sigma) * ratio


def _log_snr(sigma: float) -> float:
    """Half the log of the signal-to-noise ratio."""
    return math.log((1 - sigma) / sigma)
