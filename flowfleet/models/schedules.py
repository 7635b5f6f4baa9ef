"""Sampling schedules, from a checkpoint's scheduler configuration without the scheduler's state, or by a formula."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from numpy.typing import ArrayLike

from flowfleet.models.base import Schedule

Levels = Callable[[int], ArrayLike | None]
"""The sigmas of N steps that a pipeline hands to its scheduler before any shift, falling; None to hand it none."""


def even_levels(num_steps: int) -> ArrayLike:
    """linspace(1, 1/N, N)."""
    return np.linspace(1.0, 1 / num_steps, num_steps)


def scheduler_levels(num_steps: int) -> None:
    """Noise levels of the scheduler: evenly spaced from its highest to its lowest sigma. A static shift is already
    applied to these and is applied once more."""


def flow_match_schedule(
    config: Mapping[str, Any],
    num_steps: int,
    num_image_tokens: int,
    *,
    shift: float | None = None,
    levels: Levels = even_levels,
) -> Schedule:
    """Returns the schedule of diffusers' pipelines on a `FlowMatchEulerDiscreteScheduler`, bit for bit.

    The levels are shifted by the configuration: by its `shift`, or with `use_dynamic_shifting` by mu, which grows
    linearly with the image tokens. A given `shift` takes the place of both, and of the stretch to a terminal sigma: it
    shifts even levels once, in every family.

    Args:
        config: of a `FlowMatchEulerDiscreteScheduler`.
        num_steps: N, at least 1.
        num_image_tokens: length of the image's token sequence.
        shift: static shift of the job; None is the configuration's.
        levels: what the pipeline starts from.

    Raises:
        ValueError: no steps, or a number of steps for which the configuration gives no falling sigmas.
    """
    _require_steps(num_steps)
    scheduler_class: Any = FlowMatchEulerDiscreteScheduler
    overrides = {} if shift is None else {"shift": shift, "use_dynamic_shifting": False, "shift_terminal": None}
    levels = levels if shift is None else even_levels
    scheduler = scheduler_class.from_config({**config, **overrides})
    with np.errstate(invalid="ignore"):  # One step under a terminal shift is 0 / 0; it is refused below.
        scheduler.set_timesteps(num_steps, sigmas=levels(num_steps), mu=_shift(scheduler.config, num_image_tokens))
    sigmas = scheduler.sigmas
    if not bool((sigmas.diff() < 0).all()):
        raise ValueError(f"this model's scheduler gives no schedule of {num_steps} steps: use more steps")
    return Schedule(timesteps=scheduler.timesteps.to(torch.float32), sigmas=sigmas.to(torch.float32))


@cache
def shifted_schedule(num_steps: int, shift: float) -> Schedule:
    """sigma = s t / (1 + (s − 1) t) of t = linspace(1, 0, N + 1), in float32. Raises ValueError for no steps."""
    _require_steps(num_steps)
    even = torch.linspace(1, 0, num_steps + 1)
    sigmas = shift * even / (1 + (shift - 1) * even)
    return Schedule(timesteps=1000 * sigmas[:-1], sigmas=sigmas)


def _require_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"the number of sampling steps must be at least 1, but it is {num_steps}")


def _shift(config: Mapping[str, Any], num_image_tokens: int) -> float:
    """mu, linear through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift)."""
    base_tokens, max_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base_shift, max_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    mu: float = num_image_tokens * slope + (base_shift - slope * base_tokens)
    return mu
