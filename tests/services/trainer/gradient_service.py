"""A reward with a known gradient, served by the reward service's own servicer inside the test's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from flowfleet.proto.trainer_pb2 import TrainStepRequest
from flowfleet.rewards.gradients import PixelInput
from flowfleet.rpc import endpoint as rpc
from services.reward.execution.batcher import Limits
from services.reward.scorer import GradientOutcome, Outcome, Problem, Sample, Score, ScoreGradient, Scorer
from tests.services.reward.serving import servicer_of

BAD = "unscorable"
"""A prompt for which there is no score."""


def reward_of(pixels: Tensor, prompt: str) -> Tensor:
    """0-d: what the service computes, of pixels (3, H, W): c · mean(w p²), with c of the prompt's length and w of the
    pixels' places."""
    places = torch.arange(pixels.numel()).reshape(pixels.shape)
    weights = torch.sin(places.to(pixels) / 7)
    return (1 + len(prompt) / 10) * (weights * pixels**2).mean()


class Known(Scorer[None]):
    """See `reward_of`. `numbers` has how many samples each call had."""

    name, version, score_range = "known", "1", (float("-inf"), float("inf"))
    gives_gradient = True

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.factor = 1.0
        self.held, self._free = threading.Event(), threading.Event()
        self._hold_after: int | None = None

    def hold(self, after: int) -> None:
        """Answers so many more calls, then none until `free`; `held` is set when one waits."""
        self._hold_after = len(self.numbers) + after

    def free(self) -> None:
        self._hold_after = None
        self._free.set()

    def parse(self, params: Mapping[str, str]) -> None: ...

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        return [Score(0.0)] * len(samples)

    def score_with_gradient(self, samples: Sequence[PixelInput], params: None) -> list[GradientOutcome]:
        if self._hold_after is not None and len(self.numbers) >= self._hold_after:
            self.held.set()
            self._free.wait(120)
        self.numbers.append(len(samples))
        return [self._one(sample) for sample in samples]

    def _one(self, sample: PixelInput) -> GradientOutcome:
        if BAD in sample.prompt:
            return Problem("prompt", "it cannot be scored")
        leaf = torch.tensor(sample.pixels).requires_grad_()
        score = self.factor * reward_of(leaf, sample.prompt)
        (gradient,) = torch.autograd.grad(score, leaf)
        return ScoreGradient(float(score.detach()), np.asarray(gradient))


@dataclass
class Served:
    address: str
    scorer: Known
    stop: Callable[[], None]


@contextmanager
def served(scorer: Known | None = None, limits: Limits = Limits()) -> Iterator[Served]:
    """Listens on a free port until it is left, or stopped."""
    scorer = scorer or Known()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def start() -> tuple[Any, Any, str]:
        servicer = servicer_of(scorer, limits, CollectorRegistry())
        await servicer.start()
        server = rpc.make_server()
        servicer.add_to_server(server)
        port = rpc.listen(server, "127.0.0.1", 0)
        await server.start()
        return servicer, server, f"127.0.0.1:{port}"

    servicer, server, address = run(start())
    stopped = False

    def stop() -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            run(server.stop(None))
            run(servicer.drain())

    try:
        yield Served(address, scorer, stop)
    finally:
        stop()
        loop.call_soon_threadsafe(loop.stop)


def with_rewards(request: TrainStepRequest, address: str, prompts: Sequence[str], weight: float = 1.0) -> None:
    """Adds what a controller adds for the reward `judge`."""
    for group in sorted({item.sample.id.group for item in request.samples}):
        request.prompts.add(group=group, text=prompts[group], weights={"judge": weight})
    request.gradient_rewards.add(name="judge", service="judge", addresses=[address] if address else [])
