"""Which steps of the sampler carry noise, and how they are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowfleet.algorithms.registry import STEPS
from flowfleet.job.rules.losses import names
from flowfleet.job.rules.unheard import unheard

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec

_SIZED = ("fixed", "random", "progressive")
"""Strategies of windows that move or stand, of `rollout.window.size` steps."""


def window(job: JobSpec) -> Iterator[str]:
    """Checks the noisy steps: inside the schedule, and each setting read by the strategy."""
    rollout, window = job.rollout, job.rollout.window
    yield from _unheard_window(job)
    if rollout.noise.eta == 0 and not job.loss.from_steps:
        return
    if window.strategy == "listed":
        yield from _listed(job)
        return
    high = job.window.end
    if high > rollout.num_inference_steps:
        yield f"rollout.window.high = {high} lies beyond rollout.num_inference_steps = {rollout.num_inference_steps}"
    elif window.low >= high:
        yield f"rollout.window.low = {window.low} leaves no step below {high}: lower it"
    elif window.strategy in _SIZED and window.low + window.size > high:
        yield (
            f"rollout.window.size = {window.size} does not fit into steps {window.low}…{high - 1}: lower it, or widen "
            "rollout.window.low and .high"
        )


def _listed(job: JobSpec) -> Iterator[str]:
    steps, number = job.rollout.window.steps, job.rollout.num_inference_steps
    if not steps:
        yield 'rollout.window.strategy = "listed" needs rollout.window.steps, for example [0, 2, 5]'
    elif list(steps) != sorted(set(steps)) or steps[0] < 0 or steps[-1] >= number:
        yield f"rollout.window.steps = {list(steps)}: give ascending steps from 0 to {number - 1}, each once"


def _unheard_window(job: JobSpec) -> Iterator[str]:
    window = job.rollout.window
    where = f'with rollout.window.strategy = "{window.strategy}": leave it out, or use '
    readers: dict[str, tuple[str, ...]] = {
        "stride": ("progressive",),
        "shift_every": ("progressive",),
        "pace": ("progressive",),
        "at_end": ("progressive",),
        "steps": ("listed",),
        "fraction": ("fraction",),
    }
    if window.strategy in ("listed", "fraction"):
        readers["size"] = _SIZED
    if window.strategy == "listed":
        readers["low"] = readers["high"] = (*_SIZED, "all", "fraction")
    for name, strategies in readers.items():
        if window.strategy not in strategies:
            listening = " or ".join(f'"{strategy}"' for strategy in strategies)
            yield from unheard(job, (f"rollout.window.{name}",), where + listening)
    if window.strategy == "fraction" and job.loss.traits.takes_any_sampler and job.rollout.noise.eta > 0:
        yield (
            f'rollout.window.strategy = "fraction" has no effect with algorithm.loss = {job.loss.name}, which trains '
            'on no noisy steps: use "all"'
        )
    for name, pace in (("pace_min", "decay"), ("pace_from", "exp_decay"), ("pace_rate", "exp_decay")):
        if window.strategy != "progressive" or window.pace != pace:
            yield from unheard(
                job, (f"rollout.window.{name}",), f'without rollout.window.pace = "{pace}": leave it out'
            )
    if window.pace == "decay" and window.pace_min is not None and window.pace_min > window.shift_every:
        yield (
            f"rollout.window.pace_min = {window.pace_min} lies above rollout.window.shift_every = "
            f"{window.shift_every}, from which it falls: lower it"
        )


def noise(job: JobSpec) -> Iterator[str]:
    """Checks the reverse step's noise against step, loss and data."""
    noise, step, last = job.rollout.noise, job.step, job.rollout.num_inference_steps - 1
    if step.max_eta is not None and noise.eta > step.max_eta:
        yield f"rollout.noise.eta = {noise.eta}: {step.name} takes at most {step.max_eta:g}: lower it"
    if not step.noise_at_end and noise.eta > 0 and job.window.end > last:
        ends = f"the last step ends at sigma 0, where {step.name} adds no noise and teaches nothing"
        if job.rollout.window.strategy == "listed":
            yield f"rollout.window.steps: {ends}; leave out step {last}"
        else:
            yield f"rollout.window.high = {job.window.end}: {ends}; set rollout.window.high to at most {last}"
    if noise.eta == 0 and job.loss.traits.has_step_ratio:
        yield (
            f"rollout.noise.eta = 0 samples an ODE, which has no log-prob: give the loss {job.loss.name} an eta > 0, "
            f"or choose algorithm.loss from {names()}"
        )
    if noise.eta == 0 and noise.share_initial_noise and job.method.data == "prompts":
        yield (
            "rollout.noise.share_initial_noise with rollout.noise.eta = 0 makes all samples of a group the same: set "
            "the one to false or the other above 0"
        )
    if not step.is_gaussian and noise.eta > 0 and job.loss.needs_gaussian:
        gaussian = " or ".join(known.name for known in STEPS.values() if known.is_gaussian)
        yield (
            f"algorithm.loss = {job.loss.name} needs Gaussian log-probs, which rollout.noise.type = {step.name} has "
            f"not: set that to {gaussian}"
        )


def sampler(job: JobSpec) -> Iterator[str]:
    """Checks samplers without noise, and tails."""
    rollout, tail = job.rollout, job.rollout.tail_steps
    if rollout.sampler != "euler" and rollout.noise.eta > 0:
        yield (
            f'rollout.sampler = "{rollout.sampler}" takes no noise and has no log-prob: set rollout.noise.eta = 0 for '
            "a loss that needs none, or use rollout.tail_steps after the window, or schedule.validation_sampler for "
            "validation alone"
        )
    if tail is not None and rollout.noise.eta == 0:
        yield (
            'rollout.tail_steps has no effect with rollout.noise.eta = 0: use rollout.sampler = "dpm_solver_2" and '
            "fewer rollout.num_inference_steps"
        )
    elif tail is not None and tail >= (left := _steps_left(job)):
        yield (
            f"rollout.tail_steps = {tail} is no fewer than the {left} steps that rollout.window leaves after its noisy "
            "ones: lower it, or leave it out"
        )
    if not job.data.is_validated:
        settings = tuple(f"schedule.validation_{name}" for name in ("sampler", "samples", "height", "width"))
        yield from unheard(job, settings, "without data.validation: leave it out")


def _steps_left(job: JobSpec) -> int:
    """Steps after the earliest window."""
    window, num_steps = job.rollout.window, job.rollout.num_inference_steps
    is_sized = window.strategy in _SIZED
    return num_steps - (window.low + window.size if is_sized else job.window.end)


def guidance(job: JobSpec) -> Iterator[str]:
    """Checks that settings of guidance have some."""
    if not job.rollout.guidance.is_on and not job.writes_tokens:
        names = ("guidance_interval", "image_guidance_scale", "guidance_renorm")
        settings = tuple(f"rollout.{name}" for name in names)
        yield from unheard(job, settings, "with rollout.guidance_scale = 1: raise that, or leave it out")


def sizes(job: JobSpec) -> Iterator[str]:
    """Checks what goes with sizes by the line of data."""
    if job.data.size_column is None:
        return
    schedule = job.schedule
    refused = {
        "a model that writes text: set model.path to one that draws, or": job.writes_tokens,
        "a loss on gradients of rewards or with teachers: choose another algorithm.name, or": job.trains_on_gradients
        or bool(job.teachers),
        "trainer.mesh.sequence above 1: set that to 1, or": job.trainer.mesh.sequence != 1,
        "schedule.validation_height or validation_width: leave these out, or": schedule.validation_height is not None
        or schedule.validation_width is not None,
    }
    yield from (f"data.size_column does not go with {what} leave it out" for what, holds in refused.items() if holds)
