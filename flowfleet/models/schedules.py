"""Sampling schedules from a checkpoint's scheduler configuration, without the scheduler's state."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from flowfleet.models.base import Schedule


def flow_match_schedule(config: Mapping[str, Any], num_steps: int, num_image_tokens: int) -> Schedule:
    """What diffusers' pipelines with resolution-dependent shift sample with, bit for bit.

    Sigmas start from linspace(1, 1/N, N) and are shifted by the configuration; mu grows linearly with the image tokens.

    Args:
        config: of a `FlowMatchEulerDiscreteScheduler`.
        num_steps: N, at least 1.
        num_image_tokens: length of the image's token sequence.

    Raises:
        ValueError: no steps, or a number of steps for which the configuration gives no falling sigmas.
    """
    if num_steps < 1:
        raise ValueError(f"the number of sampling steps must be at least 1, but it is {num_steps}")
    scheduler_class: Any = FlowMatchEulerDiscreteScheduler
    scheduler = scheduler_class.from_config(dict(config))
    with np.errstate(invalid="ignore"):  # One step under a terminal shift is 0 / 0; it is refused below.
        scheduler.set_timesteps(
            sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=_shift(scheduler.config, num_image_tokens)
        )
    sigmas = scheduler.sigmas
    if not bool((sigmas.diff() < 0).all()):
        raise ValueError(f"this model's scheduler gives no schedule of {num_steps} steps: use more steps")
    return Schedule(timesteps=scheduler.timesteps.to(torch.float32), sigmas=sigmas.to(torch.float32))


def _shift(config: Mapping[str, Any], num_image_tokens: int) -> float:
    """mu, linear through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift)."""
    base_tokens, max_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base_shift, max_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    mu: float = num_image_tokens * slope + (base_shift - slope * base_tokens)
    return mu
