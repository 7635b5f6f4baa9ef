"""How much each noisy step counts in a policy loss: TempFlow-GRPO, https://arxiv.org/abs/2508.04324."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowfleet.algorithms.sde import reverse_step
from flowfleet.algorithms.settings import StepWeightSettings

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec
    from flowfleet.models.base import Schedule


def step_weights(spec: JobSpec, schedule: Schedule) -> dict[int, float]:
    """Denoising step to its factor of the loss, for each step that carries noise in some training step.

    `noise` gives std / mean std over these steps, with the std of the whole step: without it the gradient of a step
    grows as its noise shrinks. The mean of the weights is 1. `uniform` gives 1.
    """
    noise, reachable = spec.rollout.noise, spec.rollout.noise_window.reachable
    if spec.algorithm.of(StepWeightSettings).step_weights == "uniform":
        return dict.fromkeys(reachable, 1.0)
    sigmas, step = schedule.sigmas, reverse_step(noise.type)
    scales = {
        index: float(step.scales(sigmas[index], sigmas[index + 1], noise.eta, schedule.sigma_max).std)
        for index in reachable
    }
    mean = sum(scales.values()) / len(scales)
    return {index: std / mean for index, std in scales.items()}
