"""vLLM-Omni engine: `AsyncOmni` in this process, one worker on one device, with our pipelines in it.

A batch of the sampler is one request to vLLM-Omni, so its rows do not depend on other requests at the time. Weights
change between two batches: the engine pauses scheduling, which lets the running batch finish, changes them by a worker
RPC, and resumes scheduling.
"""

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flowfleet.models.registry import ModelFamily, family_of
from flowfleet.process.pulse import Pulse
from flowfleet.proto.rollout_pb2 import Bucket, LoraSpec, ModelSpec
from flowfleet.weights import weights
from services.rollout.engines import acceleration
from services.rollout.engines.base import Cancelled, GeneratedBatch, GenerationRequest, RolloutEngine
from services.rollout.engines.diffusers import check_request, load_of
from services.rollout.engines.local import copied, without_threads
from services.rollout.engines.prompts import Encoded
from services.rollout.engines.sampler import Row, batches
from services.rollout.engines.vllm_omni import launch
from services.rollout.engines.vllm_omni.launch import LoopThread
from services.rollout.engines.vllm_omni.pipelines.registry import pipeline_for
from services.rollout.engines.vllm_omni.task import Task

_AHEAD = 2
"""Batches of a request at vLLM-Omni at a time: one runs, one waits, so that the device never does."""

log = logging.getLogger(__name__)
T = TypeVar("T")
Work = Callable[[], AbstractContextManager[None]]


class VllmOmniEngine(RolloutEngine):
    """`max_batch` is the most rows of one forward; `threads` the CPU threads of torch, None for its default;
    `attention_backend` is vLLM-Omni's, which CPUs have one of.

    Raises ValueError where vLLM-Omni is not installed, and for a device that it could not take.
    """

    name = "vllm-omni"

    def __init__(
        self,
        device: torch.device,
        *,
        max_batch: int,
        threads: int | None = None,
        attention_backend: str = launch.ATTENTION_BACKEND,
        pulse: Pulse | None = None,
    ) -> None:
        launch.require_installed()
        if device.index:
            raise ValueError(
                f"the vllm-omni engine uses the first visible device, not {device}: make only that one visible"
            )
        self.device = device
        self._max_batch = max_batch
        self._threads = threads
        self._attention_backend = attention_backend
        self._loop = LoopThread("vllm-omni")
        self.pulse = pulse or Pulse(shared=True)
        self._omni: Any = None
        self._model: ModelSpec | None = None
        self._family: ModelFamily | None = None
        self._lora: LoraSpec | None = None
        self._is_base_live = False
        """True if the transformers hold the model's own weights, False if they hold trained ones."""

    async def prepare(self, model: ModelSpec, lora: LoraSpec | None) -> None:
        model = without_threads(model)  # its workers keep their own
        if self._model != model:
            await self._start(model)
        if self._lora == lora and self._is_base_live:
            return
        async with self._paused():
            installed, self._lora = self._lora, None
            if installed is not None:
                await self._perform("prepare", lambda worker: worker.install(None))
            if not self._is_base_live:
                await self._perform("prepare", lambda worker: worker.load_base(model))
                self._is_base_live = True
            if lora is not None:
                await self._perform("prepare", lambda worker: worker.install(lora))
                self._lora = copied(lora)

    async def generate(
        self, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> AsyncGenerator[GeneratedBatch, None]:
        assert self._family is not None, "prepare comes first"
        check_request(request, self._family, self._lora)
        encoded: Encoded = await self._perform("encode", lambda worker: worker.encode(request), len(request.groups))
        running: deque[asyncio.Task[GeneratedBatch]] = deque()
        try:
            for rows in batches(request, self._max_batch):
                running.append(asyncio.create_task(self._draw(request, encoded, rows, cancelled)))
                if len(running) == _AHEAD:
                    yield await running.popleft()
            while running:
                yield await running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def load_adapter(self, state: Mapping[str, Tensor]) -> None:
        async with self._paused():
            await self._perform("adapter", lambda worker: worker.load_adapter(state))

    async def receive(self, member: weights.Member, buckets: Sequence[Bucket]) -> None:
        async with self._paused():
            await self._perform("receive", lambda worker: worker.expect(buckets))
            self._is_base_live = self._is_base_live and self._lora is not None
            await self._perform("receive", lambda worker: worker.receive(member, buckets, self.pulse.beat))

    async def verify(self, hashes: Mapping[str, int]) -> str:
        async with self._paused():
            digest: str = await self._perform("verify", lambda worker: worker.verify(hashes))
        return digest

    @property
    def is_stuck(self) -> bool:
        return super().is_stuck or (self._omni is not None and self._omni.errored)

    async def close(self) -> None:
        await self._stop()
        await asyncio.to_thread(self._loop.close)

    # vLLM-Omni itself -------------------------------------------------------------------------------------------------

    async def _start(self, model: ModelSpec) -> None:
        """Another model is another vLLM-Omni. Raises ValueError for one that it cannot have here."""
        family = family_of(model.path)
        pipeline = pipeline_for(family)
        if model.compile and self.device.type == "cpu":
            raise ValueError("rollout.compile: vLLM-Omni does not compile for CPUs: turn it off, or use a GPU")
        await self._stop()
        log.info("starting vLLM-Omni with %s in %s on %s", model.path, model.dtype, self.device)
        settings = copied(model)
        self.pulse.reset()
        if model.compile:
            acceleration.watch_compilation(self.pulse)
        with self.pulse.work("prepare", patient=True):
            self._omni = await self._loop.call(
                lambda: launch.start(settings, pipeline, self.device, self._attention_backend)
            )
        try:
            work = self._work("prepare", 1.0)
            await self._submit(
                Task(lambda _: self._set_up_thread()), {}, work
            )  # The first request starts vLLM-Omni's thread.
            await self._perform("prepare", lambda worker: worker.load(settings))
        except BaseException:
            await self._stop()
            raise
        self._model, self._family, self._is_base_live = settings, family, True

    async def _stop(self) -> None:
        omni, self._omni, self._model, self._lora = self._omni, None, None, None
        if omni is not None:
            await self._loop.call(omni.shutdown)

    def _set_up_thread(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Inside, no batch runs: the one that did is finished, the others wait."""
        try:
            await self._loop.submit(self._omni.pause_generation(mode="keep"))  # Shuts its gate even if it fails then.
            yield
        finally:
            await self._loop.submit(self._omni.resume_generation())

    async def _perform(self, kind: str, function: Callable[[Any], T], weight: float = 1.0) -> T:
        """Calls a function of the worker on vLLM-Omni's thread, between two batches."""
        work = self._work(kind, weight)
        task = Task(_watched(work, function))
        with work():
            answer = await self._loop.submit(self._omni.collective_rpc("perform", args=(task,)))
        if not task.is_done:
            raise RuntimeError(f"vLLM-Omni failed: {answer}")
        return task.result()

    async def _draw(
        self, request: GenerationRequest, encoded: Encoded, rows: Sequence[Row], cancelled: Callable[[], bool]
    ) -> GeneratedBatch:
        is_abandoned = False

        def work(pipeline: Any) -> GeneratedBatch:
            def checkpoint() -> None:
                self.pulse.beat()
                pipeline.check_cancelled()
                if is_abandoned or cancelled():
                    raise Cancelled

            made: GeneratedBatch = pipeline.sampler.sample(request, encoded, rows, checkpoint)
            return made

        watch = self._work(*load_of(request, len(rows)))
        task = Task(_watched(watch, work))
        size = request.sampling.size
        shape = {"height": size.height, "width": size.width, "num_frames": size.num_frames}
        try:
            await self._submit(task, shape | {"num_inference_steps": request.sampling.num_steps}, watch)
        except asyncio.CancelledError:
            is_abandoned = True  # vLLM-Omni's own abort takes its time on a busy host.
            raise
        if not task.is_done and cancelled():
            raise Cancelled
        return task.result()

    async def _submit(self, task: Task[Any], parameters: Mapping[str, Any], work: Work) -> None:
        """Runs a task of the pipeline as one request of vLLM-Omni's, which is `work`."""
        with work():
            await self._loop.submit(self._request(task, parameters))

    async def _request(self, task: Task[Any], parameters: Mapping[str, Any]) -> None:
        """On vLLM-Omni's loop."""
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        from services.rollout.engines.vllm_omni.pipelines.base import ADAPTER, TASK

        settings = OmniDiffusionSamplingParams(
            **parameters,
            extra_args={TASK: task},
            lora_request=ADAPTER if self._lora is not None else None,
        )
        async for _ in self._omni.generate(
            {"prompt": ""}, sampling_params_list=[settings], request_id=uuid.uuid4().hex
        ):
            pass

    def _work(self, kind: str, weight: float) -> Work:
        """Work for the pulse. Loading and receiving weights have deadlines of their own and do not count as hangs."""
        return partial(self.pulse.work, kind, weight, patient=kind in ("prepare", "receive"))


def _watched(work: Work, function: Callable[[Any], T]) -> Callable[[Any], T]:
    def call(target: Any) -> T:
        with work():
            return function(target)

    return call
