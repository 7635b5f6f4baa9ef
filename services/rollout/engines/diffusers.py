"""The diffusers engine: a model adapter on one device, driven by one thread.

Everything that touches the model runs on that thread in the order asked for, so batches of several requests take turns
and a weight change never meets a forward.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from flowfleet.hardware import devices
from flowfleet.models.base import ModelAdapter
from flowfleet.models.loading import LoadFormat
from flowfleet.models.registry import ModelFamily, family_of
from flowfleet.process.pulse import Pulse
from flowfleet.proto.rollout_pb2 import Bucket, LoraSpec, ModelSpec
from flowfleet.weights import lora as adapters
from flowfleet.weights import weights
from services.rollout.engines import acceleration
from services.rollout.engines.base import Cancelled, GeneratedBatch, GenerationRequest, RolloutEngine
from services.rollout.engines.prompts import Encoded
from services.rollout.engines.sampler import Row, Sampler, batches

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class DiffusersEngine(RolloutEngine):
    """`max_batch` is the most rows of one forward; `threads` the CPU threads of torch, None for its default."""

    name = "diffusers"

    def __init__(
        self, device: torch.device, *, max_batch: int, threads: int | None = None, pulse: Pulse | None = None
    ) -> None:
        self.device = device
        self.pulse = pulse or Pulse(shared=True)
        self._max_batch = max_batch
        self._threads = threads
        self._thread = ThreadPoolExecutor(1, "engine", initializer=self._set_up_thread)
        self._model: ModelSpec | None = None
        self._lora: LoraSpec | None = None
        self._family: ModelFamily | None = None
        self._adapter: ModelAdapter | None = None
        self._sampler: Sampler | None = None

    async def prepare(self, model: ModelSpec, lora: LoraSpec | None) -> None:
        await self._run(self.pulse.work("prepare", patient=True), self._prepare, model, lora)

    async def generate(
        self, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> AsyncGenerator[GeneratedBatch, None]:
        def checkpoint() -> None:
            self.pulse.beat()
            if cancelled():
                raise Cancelled

        work = self.pulse.work("encode", len(request.groups))
        encoded = await self._run(work, self._encode, request)
        waiting = batches(request, self._max_batch)
        running: asyncio.Future[GeneratedBatch] | None = None
        try:
            while waiting or running:
                finished = await running if running else None
                if waiting:
                    rows = waiting.pop(0)
                    work = self.pulse.work(*load_of(request, len(rows)))
                    running = self._run(work, self._sample, request, encoded, rows, checkpoint)
                else:
                    running = None
                if finished is not None:
                    yield finished
        finally:
            if running is not None:
                running.cancel()

    async def load_adapter(self, state: Mapping[str, Tensor]) -> None:
        await self._run(self.pulse.work("adapter"), self._load_adapter, state)

    async def receive(self, member: weights.Member, buckets: Sequence[Bucket]) -> None:
        """The group's own deadline ends it, so it is given its time here."""
        await self._run(self.pulse.work("receive", patient=True), self._receive, member, buckets)

    async def verify(self, hashes: Mapping[str, int]) -> str:
        return await self._run(self.pulse.work("verify"), self._verify, hashes)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    # On the engine's thread -------------------------------------------------------------------------------------------

    def _set_up_thread(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        if self.device.index is not None:
            devices.bind(self.device)

    def _prepare(self, model: ModelSpec, lora: LoraSpec | None) -> None:
        if self._adapter is None or self._model != model:
            self._load(model)
        if self._lora != lora:
            self._install(lora)

    def _load(self, model: ModelSpec) -> None:
        self._model = self._lora = self._adapter = self._sampler = None
        self.pulse.reset()
        log.info("loading %s in %s on %s", model.path, model.dtype, self.device)
        self._family = family_of(model.path)
        adapter = self._adapter_of(model, self._family)
        adapter.limit_tokens(model.max_sequence_length or None)
        acceleration.accelerate(adapter.experts, compile=model.compile, quantization=model.quantization)
        if model.compile:
            acceleration.watch_compilation(self.pulse)
        self._model, self._adapter, self._sampler = copied(model), adapter, Sampler(adapter)

    def _adapter_of(self, model: ModelSpec, family: ModelFamily) -> ModelAdapter:
        """All components of the model, on the engine's device."""
        return family.load().load(
            model.path, dtype=weights.dtype_of(model.dtype), device=self.device, load_format=load_format(model)
        )

    def _install(self, lora: LoraSpec | None) -> None:
        experts = self._loaded().experts
        if self._lora is not None:
            adapters.remove_lora(experts)
            self._lora = None
        if lora is not None:
            try:
                adapters.install_lora(experts, lora)
                acceleration.adapt(experts, compile=self._model is not None and self._model.compile, merged=lora.merged)
            except BaseException:
                self._model = None  # Half an adapter may be in it.
                raise
            self._lora = copied(lora)

    def _encode(self, request: GenerationRequest) -> Encoded:
        assert self._sampler is not None, "prepare comes first"
        assert self._family is not None
        check_request(request, self._family, self._lora)
        return self._sampler.encode(request)

    def _sample(
        self, request: GenerationRequest, encoded: Encoded, rows: Sequence[Row], checkpoint: Callable[[], None]
    ) -> GeneratedBatch:
        assert self._sampler is not None
        return self._sampler.sample(request, encoded, rows, checkpoint)

    def _load_adapter(self, state: Mapping[str, Tensor]) -> None:
        adapters.load_adapter(self._loaded().experts, state)
        acceleration.merge(self._loaded().experts)

    def _receive(self, member: weights.Member, buckets: Sequence[Bucket]) -> None:
        live = self._live_weights()
        weights.require_every_weight(live, buckets)
        if self._lora is None:
            self._model = None  # The base differs from the disk: the next job loads it again.
        copy = weights.copy_into(live)

        def into(name: str, value: Tensor) -> None:
            self.pulse.beat()
            copy(name, value)

        weights.receive(member, buckets, into)

    def _verify(self, hashes: Mapping[str, int]) -> str:
        digest = weights.verify(self._live_weights(), hashes)
        derive = acceleration.refresh if self._lora is None else acceleration.merge
        derive(self._loaded().experts)
        return digest

    def _live_weights(self) -> Mapping[str, Tensor]:
        """What an update brings, by the names that it travels under."""
        experts = self._loaded().experts
        if self._lora is not None:
            return adapters.named_adapter_parameters(experts)
        return weights.full_parameters(experts)

    def _loaded(self) -> ModelAdapter:
        assert self._adapter is not None, "prepare comes first"
        return self._adapter

    # The thread itself ------------------------------------------------------------------------------------------------

    def _run(
        self, work: AbstractContextManager[None], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Calls a function there, inside `work`."""

        def watched() -> T:
            with work:
                return function(*args, **kwargs)

        return asyncio.get_running_loop().run_in_executor(self._thread, watched)


def load_format(model: ModelSpec) -> LoadFormat:
    """Where the weights of a model come from."""
    return "dummy" if model.load_format == "dummy" else "safetensors"


def load_of(request: GenerationRequest, num_rows: int) -> tuple[str, float]:
    """Kind and weight of a batch for a `Pulse`: what happens between two denoising steps grows with its pixels."""
    is_given = any(group.media for group in request.groups)
    size = request.sampling.size
    return "media" if is_given else "sample", float(num_rows * size.height * size.width * size.num_frames)


def check_request(request: GenerationRequest, family: ModelFamily, lora: LoraSpec | None) -> None:
    """Raises ValueError for what the family would not heed, or needs and was not given, and for a KL to the policy
    without adapter where there is none."""
    if request.reference_kl and lora is None:
        raise ValueError(
            "reference_kl: full weights have no adapter to switch off: set trainer.mode to lora or algorithm.kl_reward "
            "to 0"
        )
    has_images = any(group.images for group in request.groups)
    if has_images and not family.takes_images:
        raise ValueError(f"{family.title} takes no condition images: remove `images` from the prompts")
    if family.takes_images and not has_images:
        raise ValueError(f"{family.title} needs condition images: give `images` to every prompt")
    if request.sampling.guidance.embedded is not None and not family.embedded_guidance:
        raise ValueError(f"{family.title} takes no embedded guidance: remove rollout.embedded_guidance")


def copied(message: T) -> T:
    """A protobuf message of its own."""
    own = type(message)()
    own.CopyFrom(message)  # type: ignore[attr-defined]
    return own
