"""Steps that are too coarse for their noise: they add far more than the noise level that they end at.

A schedule that ends in a short last step (Qwen-Image with 10 steps: 0.183, 0.020, 0) has one before it that spans most
of what is left. `sde` and `dance_sde` size their noise by that span, and no later step takes it away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowfleet.algorithms.sde import reverse_step

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec
    from flowfleet.models.base import Schedule

MOST = 4.0
"""Largest ratio of a step's std to the level it ends at. Sound steps have up to 1.5, Qwen-Image's coarse one 24."""


def check_noise(spec: JobSpec, schedule: Schedule) -> None:
    """Raises ValueError if a step that may ever carry noise is too coarse for it, unless the job allows that.

    A step that ends at level 0 is not checked: windows leave it out unless a job asks for it by name.
    """
    noise, window = spec.rollout.noise, spec.rollout.noise_window
    if noise.eta == 0 or spec.rollout.window.allow_coarse or spec.method.data != "prompts":
        return
    step = reverse_step(noise.type)
    for index in window.reachable:
        sigma, level = schedule.sigmas[index], float(schedule.sigmas[index + 1])
        std = float(step.scales(sigma, level, noise.eta, schedule.sigma_max).std)
        if level > 0 and std > MOST * level:
            if window.strategy == "listed":
                change = "leave it out of rollout.window.steps"
            elif index > window.low:
                change = f"set rollout.window.high to at most {index}"
            else:
                change = "move rollout.window.low"
            most = int(noise.eta * MOST * level / std * 100) / 100
            raise ValueError(
                f"step {index} of {window.num_steps} is too coarse for rollout.noise.type = {noise.type}: it adds "
                f"noise of std {std:.3g} and ends at noise level {level:.3g}, less than a quarter; {change}, lower "
                f"rollout.noise.eta to at most {most:g}, or take the noise with "
                "rollout.window.allow_coarse = true"
            )
