"""Which sampling steps carry noise: the window, a function of the job's seed and step alone. Free of torch.

All samples of a job step share one window (windows that differ inside a group make training diverge), and whoever
computes it from `(seed, step)` gets the same. Steps outside the window are ODE steps: nothing of them is stored or
trained on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from flowfleet.seeds import derive_seed

if TYPE_CHECKING:
    from flowfleet.jobs import JobSpec

WindowStrategy = Literal["fixed", "random", "progressive", "all"]
"""fixed: starts at `low`. random: start drawn every job step. progressive: start moves up, wraps. all: low to high."""


def window(
    strategy: WindowStrategy,
    *,
    num_steps: int,
    size: int = 0,
    low: int = 0,
    high: int | None = None,
    seed: int = 0,
    step: int = 0,
    stride: int = 1,
    shift_every: int = 1,
) -> tuple[int, ...]:
    """The indices of the sampling steps with noise in job step `step`, in rising order.

    Args:
        strategy: see `WindowStrategy`; `random` and `progressive` are those of MixGRPO,
        https://arxiv.org/abs/2507.21802. num_steps: sampling steps of the schedule. size: steps in the window;
        ignored by `all`. low, high: the window lies in [low, high); `high` left out is all but the last step, where
        noise would stay. seed, step: the job's seed and step; `random` draws from both, `progressive` looks at `step`
        only. stride, shift_every: `progressive` moves the start by `stride` after every `shift_every` job steps.

    Raises:
        ValueError: a range outside the schedule, or one that the window does not fit into.
    """
    high = max(1, num_steps - 1) if high is None else high
    if strategy not in get_args(WindowStrategy):
        raise ValueError(f"unknown window strategy {strategy!r}: choose one of {', '.join(get_args(WindowStrategy))}")
    if not 0 <= low < high <= num_steps:
        raise ValueError(
            f"a window range needs 0 <= low < high <= {num_steps} (steps), but low is {low} and high {high}"
        )
    if strategy == "all":
        return tuple(range(low, high))
    if not 1 <= size <= high - low:
        raise ValueError(
            f"a window of {size} steps does not fit the range [{low}, {high}): size must be 1 to {high - low}"
        )
    if stride < 1 or shift_every < 1:
        raise ValueError(f"stride and shift_every must be at least 1, but are {stride} and {shift_every}")
    num_starts = high - low - size + 1
    offset = 0
    if strategy == "random":
        offset = derive_seed(seed, "window", step)
    elif strategy == "progressive":
        offset = step // shift_every * stride
    start = low + offset % num_starts
    return tuple(range(start, start + size))


def noisy_steps(spec: JobSpec, step: int) -> tuple[int, ...]:
    """The denoising steps that carry noise in a training step of a job: one window for all its groups; none of an
    ODE."""
    part = spec.rollout.window
    if spec.rollout.noise.eta == 0:
        return ()
    return window(
        part.strategy,
        num_steps=spec.rollout.num_inference_steps,
        size=part.size,
        low=part.low,
        high=part.high,
        seed=spec.seed,
        step=step,
        stride=part.stride,
        shift_every=part.shift_every,
    )
