"""Base of engines that hold a model of their own: one device, driven by one thread.

Everything that touches the model runs on that thread in the order asked for. So batches of several requests take turns,
and a weight change never meets a forward.
"""

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Generic, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from flowfleet.api.profiles import Profile
from flowfleet.hardware import devices
from flowfleet.hardware.profiling import costs_of, profiled, trace_of
from flowfleet.models.loading import LoadFormat
from flowfleet.models.registry import ModelFamily, family_of
from flowfleet.process.pulse import Pulse
from flowfleet.proto.rollout_pb2 import BatchProfile, Bucket, LoraSpec, ModelSpec
from flowfleet.weights import lora as adapters
from flowfleet.weights import weights
from services.rollout.engines import acceleration
from services.rollout.engines.base import Cancelled, GeneratedBatch, GenerationRequest, RolloutEngine

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class Held(Protocol):
    """An adapter of a model family."""

    @property
    def experts(self) -> dict[str, nn.Module]:
        """Returns the trained modules, by component name."""


Adapter = TypeVar("Adapter", bound=Held)


class ThreadedEngine(RolloutEngine):
    """Runs whatever touches the model on one thread."""

    def __init__(self, device: torch.device, max_batch: int, threads: int | None, pulse: Pulse | None) -> None:
        self.device = device
        self.pulse = pulse or Pulse(shared=True)
        self._max_batch, self._threads = max_batch, threads
        self._ended = time.monotonic()
        self._thread = ThreadPoolExecutor(1, "engine", initializer=self._set_up_thread)
        self._model: ModelSpec | None = None
        self._lora: LoraSpec | None = None

    async def prepare(self, model: ModelSpec, lora: LoraSpec | None) -> None:
        await self._run(self.pulse.work("prepare", patient=True), self._prepare_with, model, lora)

    async def load_adapter(self, state: Mapping[str, Tensor]) -> None:
        await self._run(self.pulse.work("adapter"), self._load_adapter, state)

    async def receive(self, member: weights.Member, buckets: Sequence[Bucket]) -> None:
        """The group's own deadline ends it, so it is given its time here."""
        await self._run(self.pulse.work("receive", patient=True), self._receive, member, buckets)

    async def verify(self, hashes: Mapping[str, int]) -> str:
        return await self._run(self.pulse.work("verify"), self._verify, hashes)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _run(
        self, work: AbstractContextManager[None], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Calls a function there, inside `work`."""

        def watched() -> T:
            self.idle_s += time.monotonic() - self._ended
            try:
                with work:
                    return function(*args, **kwargs)
            finally:
                self._ended = time.monotonic()

        return asyncio.get_running_loop().run_in_executor(self._thread, watched)

    # On the engine's thread -------------------------------------------------------------------------------------------

    def _require_sampled(self, model: ModelSpec, family: ModelFamily, is_sampled: bool) -> None:
        """Raises ValueError for a model that the engine does not sample."""
        if not is_sampled:
            other = "transformers" if family.writes_tokens else "diffusers"
            raise ValueError(
                f"model {model.path} is a {family.title}, which the engine {self.name} of this replica cannot sample: "
                f"start rollouts with --engine {other}"
            )

    def _require_plain(self, model: ModelSpec) -> None:
        """Raises ValueError for a model to be compiled or quantized, for engines that do neither."""
        if model.compile or model.quantization not in ("", "none"):
            raise ValueError(
                f"model {model.path} writes text: the engine {self.name} neither compiles nor quantizes it, remove "
                "rollout.compile and rollout.quantization"
            )

    def _set_up_thread(self) -> None:
        self._own_threads = self._threads or torch.get_num_threads()
        torch.set_num_threads(self._own_threads)
        if self.device.index is not None:
            devices.bind(self.device)

    def _prepare_with(self, model: ModelSpec, lora: LoraSpec | None) -> None:
        """Another number of threads needs no other model."""
        torch.set_num_threads(model.threads or self._own_threads)
        self._prepare(without_threads(model), lora)

    @abstractmethod
    def _prepare(self, model: ModelSpec, lora: LoraSpec | None) -> None: ...

    @abstractmethod
    def _load_adapter(self, state: Mapping[str, Tensor]) -> None: ...

    @abstractmethod
    def _receive(self, member: weights.Member, buckets: Sequence[Bucket]) -> None: ...

    @abstractmethod
    def _verify(self, hashes: Mapping[str, int]) -> str: ...


class LocalEngine(ThreadedEngine, Generic[Adapter]):
    """`max_batch` is the most rows of one forward; `threads` the CPU threads of torch, None for its default."""

    writes_tokens: ClassVar[bool]
    """True if the engine's models write text."""

    def __init__(
        self, device: torch.device, *, max_batch: int, threads: int | None = None, pulse: Pulse | None = None
    ) -> None:
        super().__init__(device, max_batch, threads, pulse)
        self._family: ModelFamily | None = None
        self._adapter: Adapter | None = None
        self._sampler: Any = None
        """Samples with the adapter."""

    def generate(
        self, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> AsyncGenerator[GeneratedBatch, None]:
        def start(
            encoded: Any, rows: Sequence[Any], checkpoint: Callable[[], None], is_profiled: bool
        ) -> asyncio.Future[GeneratedBatch]:
            work = self.pulse.work(*self._load_of(request, len(rows)))
            sample = self._profiled if is_profiled else self._sample
            return self._run(work, sample, request, encoded, rows, checkpoint)

        return self._generate(request, cancelled, start)

    async def _generate(
        self,
        request: GenerationRequest,
        cancelled: Callable[[], bool],
        start: Callable[[Any, Sequence[Any], Callable[[], None], bool], asyncio.Future[GeneratedBatch]],
    ) -> AsyncGenerator[GeneratedBatch, None]:
        """`start` begins a batch: of these prompts, rows and checkpoint, and profiled or not."""

        def checkpoint() -> None:
            self.pulse.beat()
            if cancelled():
                raise Cancelled

        work = self.pulse.work("encode", len(request.groups))
        encoded = await self._run(work, self._encode, request)
        waiting = self._cut(request, encoded)
        running: asyncio.Future[GeneratedBatch] | None = None
        has_begun = False
        try:
            while waiting or running:
                finished = await running if running else None
                is_profiled = request.profile and not has_begun
                running = start(encoded, waiting.pop(0), checkpoint, is_profiled) if waiting else None
                has_begun = True
                if finished is not None:
                    yield finished
        finally:
            if running is not None:
                running.cancel()

    # On the engine's thread -------------------------------------------------------------------------------------------

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
        self._require_sampled(model, self._family, self._family.trains(writes_tokens=self.writes_tokens))
        adapter = self._adapter_of(model, self._family)
        self._set_up(adapter, model)
        self._model, self._adapter = copied(model), adapter

    def _adapter_of(self, model: ModelSpec, family: ModelFamily) -> Adapter:
        """Loads all components of the model on the engine's device."""
        adapter: Adapter = family.load(writes_tokens=self.writes_tokens).load(
            model.path, dtype=weights.dtype_of(model.dtype), device=self.device, load_format=load_format(model)
        )
        return adapter

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

    @abstractmethod
    def _set_up(self, adapter: Adapter, model: ModelSpec) -> None:
        """Makes an adapter that was loaded ready to sample."""

    @abstractmethod
    def _check(self, request: GenerationRequest) -> None:
        """Raises ValueError for a request that does not fit the model."""

    def _encode(self, request: GenerationRequest) -> Any:
        """The prompts of a request as `_sample` takes them. Raises ValueError for a request that does not fit."""
        assert self._sampler is not None, "prepare comes first"
        self._check(request)
        return self._sampler.encode(request)

    @abstractmethod
    def _cut(self, request: GenerationRequest, encoded: Any) -> list[Sequence[Any]]:
        """The rows of a request in batches."""

    @abstractmethod
    def _load_of(self, request: GenerationRequest, num_rows: int) -> tuple[str, float]:
        """Kind and weight of a batch for a `Pulse`."""

    def _sample(
        self, request: GenerationRequest, encoded: Any, rows: Sequence[Any], checkpoint: Callable[[], None]
    ) -> GeneratedBatch:
        """Samples one batch; `checkpoint` is called before every step."""
        sampled: GeneratedBatch = self._sampler.sample(request, encoded, rows, checkpoint)
        return sampled

    def _profiled(self, request: GenerationRequest, *given: Any) -> GeneratedBatch:
        """Samples a batch as `_sample` does, and says where its time went."""
        with profiled(self.device) as seen:
            batch = self._sample(request, *given)
        table = Profile(
            step=0, of="rollout", on_device=devices.is_accelerator(self.device), costs=costs_of(seen, self.device)
        )
        profile = BatchProfile(table=table.model_dump_json().encode(), trace=trace_of(seen))
        return replace(batch, profile=profile)

    def _load_adapter(self, state: Mapping[str, Tensor]) -> None:
        adapters.load_adapter(self._loaded().experts, state)
        acceleration.merge(self._loaded().experts)

    def _receive(self, member: weights.Member, buckets: Sequence[Bucket]) -> None:
        live = self._live_weights()
        weights.require_every_weight(live, buckets)
        if self._lora is None:
            self._model = None  # The base differs from the disk: the next job loads it again.
        receive_into(live, member, buckets, self.pulse.beat)

    def _verify(self, hashes: Mapping[str, int]) -> str:
        digest = weights.verify(self._live_weights(), hashes)
        derive = acceleration.refresh if self._lora is None else acceleration.merge
        derive(self._loaded().experts)
        return digest

    def _live_weights(self) -> Mapping[str, Tensor]:
        """Returns the live parameters that an update overwrites, by the update's names."""
        experts = self._loaded().experts
        if self._lora is not None:
            return adapters.named_adapter_parameters(experts)
        return weights.full_parameters(experts)

    def _loaded(self) -> Adapter:
        assert self._adapter is not None, "prepare comes first"
        return self._adapter


def receive_into(
    target: Mapping[str, Tensor], member: weights.Member, buckets: Sequence[Bucket], beat: Callable[[], None]
) -> None:
    """Copies what is received into `target`; `beat` is called for each parameter."""
    copy = weights.copy_into(target)

    def into(name: str, value: Tensor) -> None:
        beat()
        copy(name, value)

    weights.receive(member, buckets, into)


def load_format(model: ModelSpec) -> LoadFormat:
    """Where the weights of a model come from."""
    return "dummy" if model.load_format == "dummy" else "safetensors"


def without_threads(model: ModelSpec) -> ModelSpec:
    """The model itself, whatever computes with it."""
    bare = copied(model)
    bare.ClearField("threads")
    return bare


def copied(message: T) -> T:
    """A protobuf message of its own."""
    copy = type(message)()
    copy.CopyFrom(message)  # type: ignore[attr-defined]
    return copy
