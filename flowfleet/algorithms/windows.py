"""Which sampling steps carry noise and are trained: a function of the job's seed and training step. Free of torch.

All samples of a training step share its steps (windows that differ inside a group make training diverge), and whoever
computes them from `(seed, step)` gets the same. Steps without noise are ODE steps: nothing of them is stored or trained
on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from flowfleet.part import Part
from flowfleet.seeds import derive_seed

if TYPE_CHECKING:
    from flowfleet.job.spec import JobSpec

WindowStrategy = Literal["fixed", "random", "progressive", "all", "listed", "fraction"]
"""fixed: starts at `low`. random: start drawn every training step. progressive: start moves up, then starts over. all:
low to high. listed: the steps of a list. fraction: noise from low to high, of which a drawn share is trained."""

Pace = Literal["constant", "decay", "exp_decay"]
"""How long `progressive` stays at a start: equally long, linearly shorter, or exponentially shorter from a step on."""

AtEnd = Literal["start_over", "stay"]
"""End of `progressive` at `high`: it goes back to `low`, or stays at the last whole window."""


class WindowPart(Part):
    """Denoising steps at which noise enters and which are trained. The same for all groups of a training step."""

    strategy: WindowStrategy = "random"
    """fixed: starts at `low`. random: start drawn every training step. progressive: moves up, then starts over. all:
    from `low` to `high`, whatever `size` is. listed: those of `steps`. fraction: noise from `low` to `high`, of which a
    share drawn every training step is trained."""
    size: int = Field(default=2, ge=1, le=1000)
    """Number of steps with noise."""
    low: int = Field(default=0, ge=0)
    """First step that may carry noise."""
    high: int | None = Field(default=None, ge=1)
    """End (exclusive) of the steps that may carry noise. Unset: half of the steps (at least `size`) for random, all but
    two for progressive, all but the last for the others."""
    stride: int = Field(default=1, ge=1)
    """Steps by which `progressive` moves the window."""
    shift_every: int = Field(default=1, ge=1)
    """Training steps after which `progressive` moves it; the first such number for a `pace` that is not constant."""
    pace: Pace = "constant"
    """How the number of training steps at one start changes. decay: falls linearly to `pace_min` at `high`. exp_decay:
    falls by the factor exp(-`pace_rate`) for each step beyond `pace_from`, rounded up."""
    pace_min: int | None = Field(default=None, ge=1)
    """Least number of training steps of `decay`; unset: a quarter of `shift_every`."""
    pace_from: int = Field(default=13, ge=0)
    """Start up to which `exp_decay` stays at `shift_every`."""
    pace_rate: float = Field(default=0.1, ge=0.0)
    """Rate of `exp_decay`."""
    at_end: AtEnd = "start_over"
    """End of `progressive` at `high`. start_over: windows that reach beyond it are cut, then it goes back to `low`.
    stay: it keeps the last whole window."""
    steps: tuple[int, ...] = ()
    """The noisy steps of `listed`, ascending from 0."""
    fraction: float = Field(default=0.6, gt=0.0, le=1.0)
    """Share of the noisy steps that `fraction` trains, rounded down."""
    allow_coarse: bool = False
    """Take steps whose noise is more than 4 times the noise level that they end at. The samples keep that noise."""


class Window(WindowPart):
    """The noisy steps of a job. `random` and `progressive` are MixGRPO's, https://arxiv.org/abs/2507.21802, `fraction`
    is DanceGRPO's, https://arxiv.org/abs/2505.07818. The job's rules refuse what does not fit into its schedule."""

    num_steps: int
    """Steps of the sampling schedule."""

    @property
    def end(self) -> int:
        """End (exclusive) of the steps that may carry noise."""
        if self.strategy == "listed":
            return max(self.steps, default=-1) + 1
        if self.high is not None:
            return self.high
        return default_end(self.strategy, num_steps=self.num_steps, size=self.size, low=self.low)

    def noisy(self, seed: int, step: int) -> tuple[int, ...]:
        """The sampling steps with noise in training step `step` of a job with this seed, in rising order."""
        if self.strategy == "listed":
            return self.steps
        if self.strategy in ("all", "fraction"):
            return tuple(range(self.low, self.end))
        start = self._start(seed, step)
        return tuple(range(start, min(start + self.size, self.end)))

    def trained(self, seed: int, step: int) -> tuple[int, ...]:
        """The steps of `noisy` that are stored and trained on, in rising order: all of them, but for `fraction`."""
        noisy = self.noisy(seed, step)
        if self.strategy != "fraction":
            return noisy
        drawn = sorted(noisy, key=lambda index: derive_seed(seed, "window/fraction", step, index))
        return tuple(sorted(drawn[: self.most]))

    @property
    def most(self) -> int:
        """The most steps that a training step trains."""
        if self.strategy == "listed":
            return len(self.steps)
        room = self.end - self.low
        if self.strategy == "fraction":
            return max(1, int(room * self.fraction))
        return room if self.strategy == "all" else self.size

    @property
    def reachable(self) -> tuple[int, ...]:
        """Lists the steps that carry noise in some training step, in rising order."""
        if self.strategy == "random":
            return tuple(range(self.low, self.end))
        if self.strategy != "progressive":
            return self.noisy(0, 0)
        starts = self._starts()
        return tuple(sorted({index for start in starts for index in range(start, min(start + self.size, self.end))}))

    def _start(self, seed: int, step: int) -> int:
        if self.strategy == "random":
            return self.low + derive_seed(seed, "window", step) % (self.end - self.low - self.size + 1)
        return self.low if self.strategy == "fixed" else self._progress(step)

    def _progress(self, step: int) -> int:
        """The start of `progressive`: a round of all starts, each for its stay, repeats for ever."""
        starts = self._starts()
        ends = list(accumulate(map(self._stay, starts)))
        if self.at_end == "stay" and step >= ends[-1]:
            return starts[-1]
        return starts[bisect_right(ends, step % ends[-1])]

    def _starts(self) -> list[int]:
        """Starting over, the last windows are cut at `high`, as MixGRPO's are. Staying, the last one is whole."""
        if self.at_end == "start_over":
            return list(range(self.low, self.end, self.stride))
        last = self.end - self.size
        return [*range(self.low, last, self.stride), last]

    def _stay(self, start: int) -> int:
        """Training steps at a start, by the formulas of MixGRPO's code."""
        if self.pace == "decay":
            least = max(1, self.shift_every // 4) if self.pace_min is None else self.pace_min
            progress = start / self.end
            return max(least, int(self.shift_every * (1 - progress) + least * progress))
        if self.pace == "exp_decay":
            return math.ceil(self.shift_every * math.exp(-self.pace_rate * max(0, start - self.pace_from)))
        return self.shift_every


def default_end(strategy: WindowStrategy, *, num_steps: int, size: int, low: int) -> int:
    """`high` of a job that leaves it out: the first half for `random`, as Flow-GRPO-Fast has it, all but the last two
    steps for `progressive`, as MixGRPO has it, and all but the last, where noise would stay, for the others. A window
    that does not fit widens it, but never to the last step.
    """
    last = max(1, num_steps - 1)
    wanted = {"random": num_steps // 2, "progressive": num_steps - 2}.get(strategy, last)
    return min(max(wanted, low + size), last)


def noisy_steps(spec: JobSpec, step: int) -> tuple[int, ...]:
    """The denoising steps that carry noise in a training step of a job, the same for all its groups; none of an ODE,
    but for a loss that begins at such steps without noise in them."""
    return spec.window.noisy(spec.seed, step) if _has_window(spec) else ()


def trained_steps(spec: JobSpec, step: int) -> tuple[int, ...]:
    """The steps of `noisy_steps` that are stored and trained on."""
    return spec.window.trained(spec.seed, step) if _has_window(spec) else ()


def _has_window(spec: JobSpec) -> bool:
    return spec.rollout.noise.eta > 0 or spec.loss.from_steps


def late_start(num_steps: int) -> int:
    """First step of the last quarter: from there on ReFL's authors draw theirs."""
    return num_steps - max(1, num_steps // 4)
