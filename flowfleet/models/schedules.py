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
    mu: float | None = None,
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
        mu: of a pipeline that computes it in its own way; None is linear in the image tokens.

    Raises:
        ValueError: no steps, or a number of steps for which the configuration gives no falling sigmas.
    """
    _require_steps(num_steps)
    scheduler_class: Any = FlowMatchEulerDiscreteScheduler
    overrides = {} if shift is None else {"shift": shift, "use_dynamic_shifting": False, "shift_terminal": None}
    levels = levels if shift is None else even_levels
    scheduler = scheduler_class.from_config({**config, **overrides})
    mu = _shift(scheduler.config, num_image_tokens) if mu is None else mu
    with np.errstate(invalid="ignore"):  # One step under a terminal shift is 0 / 0; it is refused below.
        scheduler.set_timesteps(num_steps, sigmas=levels(num_steps), mu=mu)
    sigmas = scheduler.sigmas
    if not bool((sigmas.diff() < 0).all()):
        raise ValueError(f"this model's scheduler gives no schedule of {num_steps} steps: use more steps")
    return Schedule(timesteps=scheduler.timesteps.to(torch.float32), sigmas=sigmas.to(torch.float32))


def euler_schedule(config: Mapping[str, Any], num_steps: int, shift: float | None = None) -> Schedule:
    """Noise levels for first-order steps where a checkpoint has a multistep scheduler (Wan: UniPC, Sana: DPM-Solver),
    whose steps have no density to learn from: sigma = s u / (1 + (s - 1) u) over u = linspace(1, 1/N, N), then 0.

    These are that scheduler's levels, to its rounding of timesteps. A checkpoint that was saved with a
    `FlowMatchEulerDiscreteScheduler` gets the same ones. That scheduler by itself would shift twice, as these pipelines
    hand it no levels: it starts from a range that its constructor has shifted already.

    Args:
        config: of the checkpoint's scheduler. s is its `flow_shift` (UniPC and the other multistep solvers), or its
            `shift` if it is a `FlowMatchEulerDiscreteScheduler`, whose other settings then count as well.
        num_steps: N, at least 1.
        shift: s of the job; None is the checkpoint's.

    Raises:
        ValueError: no steps, a scheduler that does not follow a flow, or one whose shift depends on the size.
    """
    return flow_match_schedule(_euler_config(config), num_steps, 0, shift=shift)


def _euler_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if config.get("use_dynamic_shifting"):
        raise ValueError(
            "this model's schedule has one shift for all sizes: set use_dynamic_shifting to false in the checkpoint's "
            "scheduler_config.json"
        )
    if "shift" in config:
        return config
    if config.get("prediction_type") != "flow_prediction" or "flow_shift" not in config:
        raise ValueError(
            "the checkpoint's scheduler_config.json is of no flow: it needs prediction_type flow_prediction and a "
            "flow_shift, or be that of a FlowMatchEulerDiscreteScheduler"
        )
    return {"num_train_timesteps": config["num_train_timesteps"], "shift": config["flow_shift"]}


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
