"""Between the service and a scorer: who runs it, how much of it at once, and what is counted.

`Batched` has a `Scorer`: calls share batches, which an `Evaluator` or a `ProcessPool` scores in threads or processes.
`Direct` has an `AsyncScorer`: each call is one call of it on the event loop, at once and for itself. Either admits so
many samples and bytes and no more.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic

import numpy as np

from flowfleet.rewards.gradients import PixelInput
from flowfleet.rewards.requests import EncodedSample
from services.reward.execution.batcher import Limits, MicroBatcher, draining, queue_full
from services.reward.execution.decoding import Opened, open_sample
from services.reward.execution.evaluator import Evaluator, finite, guarded, unless_all_failed
from services.reward.execution.groups import together
from services.reward.execution.pool import ProcessPool
from services.reward.metrics import RewardMetrics
from services.reward.scorer import AsyncScorer, GradientOutcome, Outcome, Params, Problem, Score, Scorer

_Key = tuple[Any, object]
"""Parameters, and what keeps a batch from being shared."""
_GRADIENT = "with gradient"
"""Second part of the key of calls that ask for gradients."""


class Batched(Generic[Params]):
    """Scores with `evaluator`, which has `scorer` or its like."""

    def __init__(
        self, scorer: Scorer[Params], evaluator: Evaluator[Params] | ProcessPool, limits: Limits, metrics: RewardMetrics
    ) -> None:
        self.scorer = scorer
        self._evaluator = evaluator
        self._metrics = metrics
        self.gives_gradient = scorer.gives_gradient and isinstance(evaluator, Evaluator)
        """True where `score_with_gradient` may be called: processes of a pool have their scorers to themselves."""
        self._batcher: MicroBatcher[Any, _Key, Any] = MicroBatcher(self._evaluate, limits, evaluator.num_batches)
        metrics.watch_queue(lambda: self._batcher.num_queued)

    async def start(self) -> None:
        self._batcher.start()

    async def score(self, samples: Sequence[EncodedSample], params: Params, num_bytes: int) -> list[Outcome]:
        """Returns one outcome per sample, in order. Raises QueueFull, or Unavailable (draining, or a broken scorer)."""
        if not self.scorer.needs_group:
            return await self._batcher.submit(samples, (params, None), num_bytes)
        order = together(samples)  # and no company: another caller's groups may have the same names
        outcomes = await self._batcher.submit([samples[place] for place in order], (params, object()), num_bytes)
        return [outcome for _, outcome in sorted(zip(order, outcomes, strict=True), key=lambda pair: pair[0])]

    async def score_with_gradient(
        self, samples: Sequence[PixelInput], params: Params, num_bytes: int
    ) -> list[GradientOutcome]:
        """Scores as `score`, in the same queue: one batch runs at a time, of either kind."""
        return await self._batcher.submit(samples, (params, _GRADIENT), num_bytes)

    async def drain(self) -> None:
        await self._batcher.drain()
        await asyncio.to_thread(self._evaluator.close)

    def _evaluate(self, samples: Sequence[Any], key: _Key) -> list[Any]:
        """A batch, in a thread of the batcher."""
        with self._metrics.in_flight(len(samples)):
            start = time.perf_counter()
            if key[1] == _GRADIENT:
                assert isinstance(self._evaluator, Evaluator)
                outcomes: list[Any] = evaluate_gradients(self._evaluator, samples, key[0])
            else:
                outcomes = self._evaluator(samples, key[0])
        self._metrics.observe_batch(outcomes, time.perf_counter() - start)
        unless_all_failed(self.scorer.name, outcomes)
        return outcomes


class Direct(Generic[Params]):
    """Scores with an `AsyncScorer`. Of a sample only the header is read here, in a thread."""

    gives_gradient = False

    def __init__(self, scorer: AsyncScorer[Params], limits: Limits, metrics: RewardMetrics) -> None:
        self.scorer = scorer
        self._limits = limits
        self._metrics = metrics
        self._num_samples = self._num_bytes = 0
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        await self.scorer.start()

    async def score(self, samples: Sequence[EncodedSample], params: Params, num_bytes: int) -> list[Outcome]:
        """Scores as `Batched.score` does. Cancelling it cancels the scorer's call."""
        with self._admitted(len(samples), num_bytes), self._metrics.in_flight(len(samples)):
            modalities = self.scorer.modalities
            opened = await asyncio.to_thread(lambda: [open_sample(sample, modalities) for sample in samples])
            sound = [item.sample for item in opened if isinstance(item, Opened)]
            start = time.perf_counter()
            scored = iter(await self._ask(sound, params) if sound else [])
            outcomes = [finite(next(scored)) if isinstance(item, Opened) else item for item in opened]
        self._metrics.observe_batch(outcomes, time.perf_counter() - start)
        unless_all_failed(self.scorer.name, outcomes)
        return outcomes

    async def drain(self) -> None:
        self._closing = True
        await self._idle.wait()
        await self.scorer.close()

    async def _ask(self, samples: Sequence[EncodedSample], params: Params) -> list[Outcome]:
        outcomes = await self.scorer.score(samples, params)
        if len(outcomes) != len(samples):
            raise RuntimeError(f"scorer {self.scorer.name} gave {len(outcomes)} outcomes for {len(samples)} samples")
        return outcomes

    @contextmanager
    def _admitted(self, num_samples: int, num_bytes: int) -> Iterator[None]:
        if self._closing:
            raise draining()
        limits = self._limits
        if self._num_samples + num_samples > limits.max_queued or self._num_bytes + num_bytes > limits.max_queued_bytes:
            raise queue_full(self._num_samples, self._num_bytes, limits)
        self._num_samples += num_samples
        self._num_bytes += num_bytes
        self._idle.clear()
        try:
            yield
        finally:
            self._num_samples -= num_samples
            self._num_bytes -= num_bytes
            if not self._num_samples:
                self._idle.set()


Engine = Batched[Any] | Direct[Any]


def evaluate_gradients(
    evaluator: Evaluator[Params], samples: Sequence[PixelInput], params: Params
) -> list[GradientOutcome]:
    """Returns one outcome per sample, in order."""
    scorer, pulse = evaluator.scorer, evaluator.pulse
    parts, score = [[one] for one in samples], lambda some: scorer.score_with_gradient(some, params)
    with pulse.work("gradient", len(samples)):
        return guarded(scorer.name, "gradients", parts, score, _finite, pulse.beat)


def _finite(sample: PixelInput, outcome: GradientOutcome) -> GradientOutcome:
    if isinstance(outcome, Problem):
        return outcome
    assert outcome.gradient.shape == sample.pixels.shape, "a gradient has the shape of its pixels"
    plain = finite(Score(outcome.value, outcome.components))
    if isinstance(plain, Problem):
        return plain
    if not bool(np.isfinite(outcome.gradient).all()):
        return Problem("non_finite", "the gradient has NaN or infinite elements")
    return outcome
