"""A fixed number of optimizer steps. On a GPU each is one CUDA graph, which nothing on the host delays.

A loss is a function without arguments that draws its own batch on the device. Between two reports the host launches one
graph a step and waits for nothing, so a loss must not read values back (`item()`, masks as indices, copies from the
host). Random numbers come from torch's global generator, and all kernels are deterministic: with the same seed, GPU and
libraries the weights are the same bits.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

logger = logging.getLogger(__name__)

NUM_EAGER_STEPS = 3
"""Steps before the capture: they compile kernels and choose algorithms. They count."""
NUM_REPORTS = 20


@dataclass(frozen=True)
class Report:
    """What the steps since the last report came to. On a GPU the first report's seconds include compilation."""

    num_steps: int
    loss: float
    """Mean over these steps."""
    seconds: float


def seconds_at_speed(reports: Sequence[Report]) -> float:
    """Seconds that all steps take at the speed of every report but the first, if there are more."""
    later = reports[1:] or reports
    speed = sum(one.num_steps for one in later) / sum(one.seconds for one in later)
    return sum(one.num_steps for one in reports) / speed


@dataclass(frozen=True)
class Recipe:
    """How weights are trained. The rate rises over `num_warmup` steps and falls to zero over the last `cooldown`."""

    num_steps: int
    rate: float
    num_warmup: int = 500
    cooldown: float = 0.4
    """Share of the steps; the fall follows a cosine."""
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    max_norm: float = 1.0
    """Norm that gradients are clipped to."""

    def rates(self) -> Tensor:
        """Learning rate of each step, (num_steps,) float32."""
        steps = torch.arange(self.num_steps, dtype=torch.float64)
        rising = ((steps + 1) / max(1, self.num_warmup)).clamp(max=1.0)
        left = (self.num_steps - steps) / max(1.0, self.cooldown * self.num_steps)
        falling = 0.5 * (1 - torch.cos(math.pi * left.clamp(max=1.0)))
        return (self.rate * torch.minimum(rising, falling)).float()


@contextmanager
def prepared() -> Iterator[None]:
    """Within, settings that `deterministic` needs before CUDA is first used, and attention that takes masks.

    Those that also choose kernels of the CPU are undone at the end.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.benchmark = False
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with (
            sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),  # the others take no mask on a GPU
            torch._inductor.config.patch(deterministic=True),  # choose no kernel by its time if that changes a sum
        ):
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


@contextmanager
def deterministic() -> Iterator[None]:
    """Within, every kernel computes the same bits each time; one that cannot raises."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def train(
    name: str,
    parameters: Sequence[nn.Parameter],
    loss: Callable[[], Tensor],
    recipe: Recipe,
    after_step: Callable[[], None] = lambda: None,
) -> list[Report]:
    """Takes `recipe.num_steps` steps on `parameters` in place. Returns the reports, oldest first.

    `after_step` runs within each step, under the same rules as `loss`. Raises ValueError where the loss is no number.
    """
    step = _Step(parameters, loss, recipe, after_step)
    size = max(1, recipe.num_steps // NUM_REPORTS)
    reports, done = list[Report](), 0
    while done < recipe.num_steps:
        count, started = min(size, recipe.num_steps - done), time.perf_counter()
        with deterministic():
            step.take(count)
        report = Report(count, step.mean_loss(count), time.perf_counter() - started)
        reports.append(report)
        done += count
        if not math.isfinite(report.loss):
            raise ValueError(f"{name}: the loss is {report.loss} after {done} steps: lower the learning rate")
        speed = count / report.seconds
        logger.info("%s step %d of %d: loss %.4f, %.1f steps/s", name, done, recipe.num_steps, report.loss, speed)
    return reports


class _Step:
    """One step of AdamW, first run as it is, then as a CUDA graph."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        loss: Callable[[], Tensor],
        recipe: Recipe,
        after_step: Callable[[], None],
    ) -> None:
        self._parameters, self._loss, self._after_step = parameters, loss, after_step
        self._max_norm = recipe.max_norm
        self._device = parameters[0].device
        self._rates = recipe.rates().to(self._device)
        self._rate = torch.zeros((), device=self._device)
        self._index = torch.zeros(1, dtype=torch.long, device=self._device)
        self._total = torch.zeros((), device=self._device)
        self._optimizer = torch.optim.AdamW(
            parameters,
            lr=self._rate,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=True,
            capturable=self._device.type == "cuda",
        )
        self._num_eager = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def take(self, count: int) -> None:
        for _ in range(count):
            if self._graph is not None:
                self._graph.replay()
            elif self._device.type == "cpu":
                self._run()
            elif self._num_eager < NUM_EAGER_STEPS:
                self._num_eager += 1
                _aside(self._run)
            else:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph):
                    self._run()
                self._graph.replay()

    def mean_loss(self, count: int) -> float:
        """Waits for the device. Mean over the last `count` steps."""
        total = self._total.item() / count
        self._total.zero_()
        return total

    def _run(self) -> None:
        self._rate.copy_(self._rates.index_select(0, self._index).squeeze(0))
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, self._max_norm, foreach=True)
        self._optimizer.step()
        self._after_step()
        self._total.add_(loss.detach())
        self._index.add_(1)


def _aside(run: Callable[[], None]) -> None:
    """Runs on a stream of its own, as what is captured later must have."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
