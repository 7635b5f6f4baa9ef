"""Reverse steps: from a noisy sample at sigma to one at the next, smaller sigma, and how likely that move was.

Every step here is linear: `mean = a * latents + b * velocity`, and the sample is `mean + std * noise`. A step type is
one `StepFormula`, which gives a, b and std from the sigmas; `ReverseStep` does the rest. Rollout and trainer call the
same `ReverseStep`: the rollout with `noise`, the trainer with the stored `prev_sample`. Both compute the
log-probability from `prev_sample.detach() - mean`, so the recomputed one is equal bit for bit where the velocity is.

The scales are computed on the CPU in float64 from the float32 sigmas and rounded once, so a row's result does not
depend on the other rows of its batch. Element-wise arithmetic is in the dtype of `latents`: float32, or float64
against oracles.

`std` is always the standard deviation of the whole step (for `sde` it includes `sqrt(-dt)`), and a log-probability is
the MEAN over the elements of a sample, not their sum. Without noise (eta 0, or std 0 as at the last `cps` step) the
sample is the mean, with eta 0 exactly the ODE step, and the log-probability is 0 by definition.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from flowfleet.algorithms import registry
from flowfleet.algorithms.parts import LatentParts, joined
from flowfleet.hardware import devices

Sigma = float | Tensor
"""A value for the batch (float or 0-d tensor), or a tensor (B,) with one a row."""


@dataclass(frozen=True, slots=True)
class StepScales:
    """Float64 CPU tensors, (1,) or (B,), that define a linear Gaussian step."""

    latents: Tensor
    velocity: Tensor
    std: Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """A reverse step; every tensor has the device of the latents, and their dtype unless it says otherwise."""

    prev_sample: Tensor
    """(B, ...): the sample at the next sigma; carries no gradient."""
    log_prob: Tensor
    """(B,) float64 where the device has it: mean over the elements of a sample; differentiable in the velocity."""
    part_log_probs: Tensor
    """(B, P) the same of each part of the latents, of which `log_prob` is joined; P is 1 where they have no parts."""
    mean: Tensor
    """(B, ...): differentiable in the velocity."""
    std: Tensor
    """(B,): standard deviation of the whole step."""


StepFormula = Callable[[Tensor, Tensor, float, Tensor], StepScales]
"""(sigma, sigma_next, eta, sigma_max), all float64 on the CPU, to scales."""


@dataclass(frozen=True, slots=True)
class ReverseStep:
    """A step type: its formula, and whether its log-probability is the Gaussian or the bare squared distance."""

    name: str
    formula: StepFormula
    is_gaussian: bool = True
    parts: LatentParts | None = None
    """Parts of flat latents (B, N), whose log-probs are joined by their weights."""

    def __call__(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: Sigma,
        sigma_next: Sigma,
        *,
        eta: float,
        sigma_max: Sigma,
        noise: Tensor | None = None,
        prev_sample: Tensor | None = None,
    ) -> StepResult:
        """Takes the step with `noise` (rollout), or evaluates the given `prev_sample` (trainer).

        Args:
            latents: (B, ...) float32 or float64, the sample at `sigma`.
            velocity: (B, ...) of any float dtype, the model's dx/dsigma at `sigma`.
            sigma, sigma_next: in (0, 1] and [0, sigma).
            eta: noise level, at least 0; 0 makes this the ODE step for every type.
            sigma_max: the schedule's second sigma; it replaces sigma in `1 - sigma` where sigma is 1.
            noise: (B, ...) standard normal. May be left out only if eta is 0.
            prev_sample: (B, ...) the stored sample at `sigma_next`. At most one of `noise` and `prev_sample`.
        """
        _check_inputs(latents, velocity, eta, noise, prev_sample)
        scales = self.scales(sigma, sigma_next, eta, sigma_max)
        if len(scales.std) not in (1, len(latents)):
            raise ValueError(f"need one sigma or one a row, but got {len(scales.std)} for {len(latents)} rows")
        mean = _rows(scales.latents, latents) * latents + _rows(scales.velocity, latents) * velocity.to(latents.dtype)
        std = scales.std.to(latents.device, latents.dtype).expand(latents.shape[0])
        if prev_sample is None:
            prev_sample = mean if noise is None else mean + _rows(scales.std, latents) * noise.to(latents.dtype)
        prev_sample = prev_sample.detach().to(latents.dtype)
        squares = (prev_sample - mean).square().flatten(1)
        pieces = torch.split(squares, list(self.parts.lengths), dim=1) if self.parts else (squares,)
        log_probs = torch.stack([self._log_prob(piece, scales.std) for piece in pieces], dim=1)
        log_prob = joined(log_probs, self.parts) if self.parts else log_probs[:, 0]
        return StepResult(prev_sample, log_prob, log_probs, mean, std)

    def scales(self, sigma: Sigma, sigma_next: Sigma, eta: float, sigma_max: Sigma) -> StepScales:
        """Scales of steps from `sigma` to `sigma_next`; see `__call__` for the arguments."""
        s, s_next, s_max = (_float64(value) for value in (sigma, sigma_next, sigma_max))
        if not bool(((s_next >= 0) & (s_next < s) & (s <= 1) & ((s < 1) | (s_max < 1))).all()):
            raise ValueError(
                "a reverse step needs 0 <= sigma_next < sigma <= 1, and sigma_max < 1 where sigma is 1, but got "
                f"sigma={s.tolist()}, sigma_next={s_next.tolist()}, sigma_max={s_max.tolist()}"
            )
        if eta > 0:
            return self.formula(s, s_next, eta, s_max)
        dt = s_next - s  # Euler, the step of diffusers' `FlowMatchEulerDiscreteScheduler`
        return StepScales(torch.ones_like(dt), dt, torch.zeros_like(dt))

    def _log_prob(self, squares: Tensor, std: Tensor) -> Tensor:
        """(B,) from the squared deviation from the mean (B, N); 0 in rows without noise.

        The mean is taken in float64: a clip range of .2 nats over a video's 10^7 elements is 2e-8, and float32 resolves
        log-probs to 1e-7. The rounding of single elements averages out, to about 1e-7 / sqrt(elements).
        """
        squared = squares.mean(dim=1, dtype=torch.float64 if devices.has_float64(squares.device) else None)
        has_noise = std > 0
        scale, offset = -has_noise.double(), torch.zeros_like(std)
        if self.is_gaussian:
            safe_std = torch.where(has_noise, std, 1.0)
            scale = scale / (2 * safe_std.square())
            offset = torch.where(has_noise, -safe_std.log() - 0.5 * math.log(2 * math.pi), 0.0)
        return squared * scale.to(squared) + offset.to(squared)


def sde_scales(sigma: Tensor, sigma_next: Tensor, eta: float, sigma_max: Tensor) -> StepScales:
    """Flow-GRPO, https://arxiv.org/abs/2505.05470, eq. 9: Euler-Maruyama on the SDE that shares the ODE's marginals.

    With b = eta sqrt(s / (1 - s)), s in the root replaced by `sigma_max` only in `1 - s` and only where s is 1:
    mean = x (1 + b^2 dt / (2s)) + v (1 + b^2 (1 - s) / (2s)) dt, std = b sqrt(-dt).
    """
    denominator = 1 - torch.where(sigma == 1, sigma_max, sigma)
    return euler_maruyama(sigma, sigma_next, variance=eta**2 * sigma / denominator)


def dance_sde_scales(sigma: Tensor, sigma_next: Tensor, eta: float, sigma_max: Tensor) -> StepScales:
    """DanceGRPO, https://arxiv.org/abs/2505.07818: as `sde`, but the diffusion coefficient is `eta` at every sigma.

    mean = x + v dt - eta^2 score dt / 2 with score = -(x - (1 - s) x0) / s^2 and x0 = x - s v; std = eta sqrt(s - s').
    """
    del sigma_max
    return euler_maruyama(sigma, sigma_next, variance=torch.full_like(sigma, eta**2))


def cps_scales(sigma: Tensor, sigma_next: Tensor, eta: float, sigma_max: Tensor) -> StepScales:
    """Coefficients-preserving sampling, https://arxiv.org/abs/2509.05952: no more noise than the schedule has at s'.

    std = s' sin(eta pi / 2); mean = x0 (1 - s') + n sqrt(s'^2 - std^2) with x0 = x - s v and n = x + (1 - s) v.
    """
    del sigma_max
    if eta > 1:
        raise ValueError(f"the step type cps needs eta in [0, 1], but it is {eta}: lower rollout.noise.eta")
    keep = sigma_next * math.cos(eta * math.pi / 2)
    return StepScales(
        latents=1 - sigma_next + keep,
        velocity=keep * (1 - sigma) - (1 - sigma_next) * sigma,
        std=sigma_next * math.sin(eta * math.pi / 2),
    )


def euler_maruyama(sigma: Tensor, sigma_next: Tensor, variance: Tensor) -> StepScales:
    """Euler-Maruyama on the reverse SDE of a linear flow whose diffusion coefficient squared is `variance`: with the
    score -(x + (1 - s) v) / s, mean = x + v dt - variance score dt / 2 and std = sqrt(variance) sqrt(-dt)."""
    dt = sigma_next - sigma
    drift = variance / (2 * sigma)
    return StepScales(1 + drift * dt, (1 + drift * (1 - sigma)) * dt, (variance * -dt).sqrt())


def ode_step(latents: Tensor, velocity: Tensor, sigma: Sigma, sigma_next: Sigma) -> Tensor:
    """The deterministic step: (B, ...) at `sigma_next`, differentiable; equal bit for bit to diffusers' Euler step."""
    dt = _float64(sigma_next) - _float64(sigma)
    return latents + _rows(dt, latents) * velocity.to(latents.dtype)


@cache
def reverse_step(name: str) -> ReverseStep:
    """The step type that a job file calls so, by the registry. Raises KeyError if there is none."""
    step = registry.STEPS[name]
    return ReverseStep(name, step.load(), step.is_gaussian)


def _float64(value: Sigma) -> Tensor:
    tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    return tensor.double().reshape(-1)


def _rows(scale: Tensor, latents: Tensor) -> Tensor:
    """(1,) or (B,) to a shape that broadcasts over the rows of `latents`."""
    return scale.to(latents.device, latents.dtype).reshape(-1, *[1] * (latents.ndim - 1))


def _check_inputs(
    latents: Tensor, velocity: Tensor, eta: float, noise: Tensor | None, prev_sample: Tensor | None
) -> None:
    if latents.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"latents must be float32 (or float64), but they are {latents.dtype}: store trajectories in float32"
        )
    if eta < 0:
        raise ValueError(f"eta must be at least 0, but it is {eta}")
    if noise is not None and prev_sample is not None:
        raise ValueError("give noise to take a step or prev_sample to evaluate one, not both")
    if noise is None and prev_sample is None and eta != 0:
        raise ValueError("a step with eta above 0 needs noise, or prev_sample to evaluate")
    for name, tensor in (("velocity", velocity), ("noise", noise), ("prev_sample", prev_sample)):
        if tensor is not None and tensor.shape != latents.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but the latents have {tuple(latents.shape)}")
