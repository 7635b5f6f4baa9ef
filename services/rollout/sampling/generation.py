"""Task that takes an admitted request through engine and publisher.

When the caller goes away, the engine stops at the next denoising step, but a batch that was finished is still
published. While a batch is published the engine makes the next. A request that gives way ends as a whole if an update
of the weights begins before its first step: another call gets it under the new version.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import torch

from flowfleet.errors import Conflict
from flowfleet.hardware import devices
from flowfleet.proto.common_pb2 import PURPOSE_TRAIN, Sample, SampleId
from flowfleet.proto.rollout_pb2 import GenerateEvent, GenerateRequest
from flowfleet.rpc.endpoint import MAX_MESSAGE_BYTES
from services.rollout.engines.base import Cancelled, GeneratedBatch, GenerationRequest
from services.rollout.metrics import RolloutMetrics
from services.rollout.sampling.publisher import Publisher

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Generation:
    device: torch.device
    generate: Callable[[GenerationRequest, Callable[[], bool]], AsyncGenerator[GeneratedBatch, None]]
    """The engine's."""
    publisher: Publisher
    metrics: RolloutMetrics
    wire: GenerateRequest
    request: GenerationRequest
    check: Callable[[], None]
    """Raises if the weights are no longer those of the request."""
    is_overtaken: Callable[[], bool]
    """Says that an update waits."""
    on_done: Callable[[int, bool], None]
    """Hears of samples that ended: how many, and whether their data was stored."""

    def __post_init__(self) -> None:
        self._left = self.request.num_samples
        self._wanted = True
        self._has_begun = self._gave_way = False
        self._finished: asyncio.Queue[GenerateEvent | None] = asyncio.Queue()
        self._context = {"job": self.wire.job_id, "step": self.wire.step}

    async def events(self) -> AsyncGenerator[GenerateEvent, None]:
        """Runs the request and yields its samples as they are published or fail. Raises what stopped it."""
        task = asyncio.create_task(self._run(), name="generation")
        task.add_done_callback(self._ended)
        try:
            while (event := await self._finished.get()) is not None:
                yield event
            await task
        finally:
            self._wanted = False

    async def _run(self) -> None:
        start = time.perf_counter()
        publishing: asyncio.Task[None] | None = None
        try:
            async with aclosing(self.generate(self.request, self._must_stop)) as batches:
                async for batch in batches:
                    self.check()
                    if publishing is not None:
                        await publishing
                    publishing = asyncio.create_task(self._publish(batch))
        except Cancelled:
            if self._gave_way:
                raise Conflict("an update of the weights came before the first denoising step: ask again") from None
            log.info("caller cancelled: discarding %d unfinished samples", self._left, extra=self._context)
        finally:
            try:
                if publishing is not None:
                    await publishing
            finally:
                self._close(time.perf_counter() - start)

    async def _publish(self, batch: GeneratedBatch) -> None:
        start = time.perf_counter()
        problems = [(sample, sample.problem) for sample in batch.samples]
        good = tuple(sample for sample, problem in problems if not problem)
        samples = await self.publisher.publish(self.wire, replace(batch, samples=good))
        self.metrics.published(
            self.wire.job_id, len(samples), {**batch.seconds, "publish": time.perf_counter() - start}
        )
        self.metrics.encoded(self.wire.job_id, batch.prompts)
        self.metrics.peak_memory(devices.peak_memory_bytes(self.device))
        self._count(len(samples), published=True)
        if (profile := batch.profile) is not None:
            if profile.ByteSize() > MAX_MESSAGE_BYTES // 2:
                profile.ClearField("trace")
            self._finished.put_nowait(GenerateEvent(profile=profile))
        is_streamed = self.wire.purpose == PURPOSE_TRAIN  # its id says enough
        for sample in samples:
            log.debug("made", extra={**self._context, "sample": f"{sample.id.group}/{sample.id.index}"})
            self._finished.put_nowait(GenerateEvent(sample=Sample(id=sample.id) if is_streamed else sample))
        for failed, problem in ((sample, problem) for sample, problem in problems if problem):
            place = SampleId(job_id=self.wire.job_id, step=self.wire.step, group=failed.group, index=failed.index)
            log.warning("sample %d/%d failed: %s", failed.group, failed.index, problem, extra=self._context)
            self._finished.put_nowait(GenerateEvent(sample=Sample(id=place), failure=problem))

    def _must_stop(self) -> bool:
        """Asked from the engine's thread before every denoising step."""
        if not self._has_begun and self.wire.gives_way and self.is_overtaken():
            self._gave_way = True
        self._has_begun = not self._gave_way
        return self._gave_way or not self._wanted

    def _close(self, seconds: float) -> None:
        made = self.request.num_samples - self._left
        log.info("published %d of %d samples in %.2f s", made, self.request.num_samples, seconds, extra=self._context)
        self.metrics.dropped(self.wire.job_id, self._left)
        self._count(self._left, published=False)
        self._finished.put_nowait(None)

    def _count(self, num_samples: int, *, published: bool) -> None:
        self._left -= num_samples
        self.on_done(num_samples, published)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Consumes the error of a request whose caller is gone."""
        if not task.cancelled() and task.exception() is not None and not self._wanted:
            log.error("cancelled request failed", exc_info=task.exception(), extra=self._context)
