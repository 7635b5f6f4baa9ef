"""Which sampler draws the steps that carry no noise, and how often it calls the model. Free of torch.

`euler` and `dpm_solver_2` (solver.py) both call the model once a step. After the last noisy step a job may use
the second-order sampler in fewer steps (`rollout.tail_steps`): noisy steps and those before them stay on the job's
schedule, so nothing that is trained depends on the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from flowfleet.algorithms.windows import noisy_steps

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec

SamplerName = Literal["euler", "dpm_solver_2"]
"""euler: the first-order step of the ODE. dpm_solver_2: DPM-Solver++ of second order, multistep."""

_STEPS_AVERAGED = 1000


def tail_length(noisy: Sequence[int], num_steps: int, tail_steps: int | None) -> int:
    """Steps of the tail after the last of the noisy ones: `tail_steps`, or all that are left where these are fewer. 0:
    there is no tail."""
    return min(tail_steps, num_steps - 1 - noisy[-1]) if tail_steps and noisy else 0


def model_calls(noisy: Sequence[int], num_steps: int, tail_steps: int | None) -> int:
    """Model calls a sample of these noisy steps; with guidance each call is two forwards."""
    tail = tail_length(noisy, num_steps, tail_steps)
    return noisy[-1] + 1 + tail if tail else num_steps


def mean_model_calls(spec: JobSpec) -> float:
    """Model calls a training sample of a job, the mean over its first training steps: windows differ."""
    rollout = spec.rollout
    steps = range(max(1, min(spec.schedule.steps, _STEPS_AVERAGED)) if rollout.tail_steps else 1)
    calls = [model_calls(noisy_steps(spec, step), rollout.num_inference_steps, rollout.tail_steps) for step in steps]
    return sum(calls) / len(calls)
