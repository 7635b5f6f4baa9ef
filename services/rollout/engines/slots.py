"""Engine that samples for several jobs: one base, an adapter a slot.

A batch of one job runs the forward that the job has alone: the live adapter's parameters are pointed at the slot's, or
are overwritten with them where compiled code or graphs hold their addresses. Batches of several jobs may share a
forward, in which each row has its own adapter (flowfleet/quantization/mixed.py). Whose batch comes next is decided by
`Turns`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from flowfleet.models.base import ModelAdapter
from flowfleet.proto.rollout_pb2 import Adapter, LoraSpec, ModelSpec
from flowfleet.quantization import mixed
from flowfleet.weights import lora as adapters
from flowfleet.weights import weights
from services.rollout.engines.base import Cancelled, GeneratedBatch, GenerationRequest
from services.rollout.engines.local import LocalEngine
from services.rollout.engines.prompts import Encoded
from services.rollout.engines.sampler import Row
from services.rollout.engines.turns import Share, Turns, Waiting

SLOTS: Final = 16
"""On CPUs; on accelerators an operator says how many adapters have room."""


@dataclass(frozen=True)
class _Held:
    """Adapter in a slot, on the device."""

    lora: LoraSpec
    threads: int
    state: Mapping[str, Tensor]


@dataclass(eq=False)
class _Part:
    """A batch of one request."""

    slot: int
    request: GenerationRequest
    encoded: Encoded
    rows: Sequence[Row]
    checkpoint: Callable[[], None]
    done: asyncio.Future[GeneratedBatch]
    is_profiled: bool
    ended: Cancelled | None = None


class SlotEngine(LocalEngine[ModelAdapter]):
    """See the module."""

    _sharing = False
    _live: _Held | None = None
    """Whose parameters the live adapter has."""
    _is_flat = False
    """True once a layer was found whose rows are not those of the forward."""
    stacks = False
    """True if slots are static tensors for grouped products."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.slots = SLOTS if self.device.type == "cpu" else 0
        self._held: dict[int, _Held] = {}
        self._waiting: Turns[_Part] = Turns()
        self._pump: asyncio.Task[None] | None = None

    @property
    def mixes(self) -> bool:
        return not self._is_flat

    async def share(self, adapter: Adapter) -> None:
        await self._run(self.pulse.work("prepare", patient=True), self._share_base, adapter.model, adapter.lora)

    async def hold(self, slot: int, adapter: Adapter, state: Mapping[str, Tensor]) -> str:
        held, digest = await asyncio.to_thread(self._moved, adapter, state)
        if self.stacks:
            await self._run(self.pulse.work("adapter"), self._fill, slot, held)
        else:  # tensors of its own, which no running forward reads
            self._fill(slot, held)
        return digest

    def generate_with(
        self, slot: int, share: Share, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> AsyncGenerator[GeneratedBatch, None]:
        def start(
            encoded: Encoded, rows: Sequence[Row], checkpoint: Callable[[], None], is_profiled: bool
        ) -> asyncio.Future[GeneratedBatch]:
            done = asyncio.get_running_loop().create_future()
            part = _Part(slot, request, encoded, rows, checkpoint, done, is_profiled)
            branches = 2 if request.sampling.guidance.is_on else 1
            cost = branches * max(1, request.sampling.num_steps) * self._load_of(request, len(rows))[1]
            own = replace(share, key=None) if is_profiled else share
            self._waiting.add(Waiting(own, part, len(rows), cost))
            if self._pump is None or self._pump.done():
                self._pump = asyncio.create_task(self._run_waiting(), name="batches")
            return done

        return self._generate(request, cancelled, start)

    async def _run_waiting(self) -> None:
        """Runs batches in their turns until none waits."""
        while self._waiting:
            taken = self._waiting.next(self._max_batch)
            parts = [one.work for one in taken if not one.work.done.cancelled()]
            begun = time.perf_counter()
            if parts:
                await self._run_parts(sorted(parts, key=lambda part: part.slot))
            self._waiting.ran(taken, time.perf_counter() - begun)

    async def _run_parts(self, parts: list[_Part]) -> None:
        kind, load = self._load_of(parts[0].request, sum(len(part.rows) for part in parts))
        try:
            made = await self._run(self.pulse.work(kind, load), self._sample_parts, parts)
        except Exception as error:
            self._is_flat |= isinstance(error, mixed.Flat)
            if len(parts) > 1 and not isinstance(error, Cancelled):  # whose fault it is shows alone
                for part in parts:
                    await self._run_parts([part])
                return
            for part in parts:
                if not part.done.cancelled():
                    part.done.set_exception(part.ended or error)
            return
        for part, batch in zip(parts, made, strict=True):
            if not part.done.cancelled():
                part.done.set_exception(part.ended) if part.ended else part.done.set_result(batch)

    # On the engine's thread -------------------------------------------------------------------------------------------

    def _sample_parts(self, parts: Sequence[_Part]) -> list[GeneratedBatch]:
        if len(parts) == 1:
            (part,) = parts
            self._activate(self._held[part.slot])
            sample = self._profiled if part.is_profiled else self._sample
            return [sample(part.request, part.encoded, part.rows, part.checkpoint)]

        def checkpoint() -> None:
            """Ends the batch once no part is wanted."""
            for part in parts:
                try:
                    if part.ended is None:
                        part.checkpoint()
                except Cancelled as ended:
                    part.ended = ended
            if all(part.ended for part in parts):
                raise Cancelled

        adapter = self._loaded()
        joins, adapter.joins_branches = adapter.joins_branches, False
        try:
            with self._runs.of([part.slot for part in parts for _ in part.rows]):
                together = [(part.request, part.encoded, part.rows) for part in parts]
                made: list[GeneratedBatch] = self._sampler.sample_together(together, checkpoint)
                return made
        finally:
            adapter.joins_branches = joins

    def _prepare(self, model: ModelSpec, lora: LoraSpec | None) -> None:
        if self._sharing:
            self._sharing, self._live, self._held = False, None, {}
            self._install(None)  # its parameters are those of slots
        super()._prepare(model, lora)

    def _share_base(self, model: ModelSpec, lora: LoraSpec) -> None:
        self._prepare_with(model, lora)
        self.stacks |= self.device.type != "cpu"
        self._runs, self._is_flat = mixed.Runs(self.slots, self.device), False
        mixed.put(self._modules(), self._runs)
        self._sharing = True

    def _moved(self, adapter: Adapter, state: Mapping[str, Tensor]) -> tuple[_Held, str]:
        """The adapter on the device, and the digest of what is there."""
        live = adapters.named_adapter_parameters(self._loaded().experts)
        adapters.check_adapter(live, state, adapter.lora.rank)
        held = {name: state[name].to(self.device) for name in live}
        digest = weights.digest(weights.tensor_hashes(held.items()))
        return _Held(adapter.lora, adapter.model.threads, held), digest

    def _activate(self, held: _Held) -> None:
        """Makes the live adapter that of a slot."""
        torch.set_num_threads(held.threads or self._own_threads)
        if self._live is held:
            return
        assert self._model is not None
        if self._model.compile and self._lora is not None and not _alike(self._lora, held.lora):
            self._install(held.lora)
            mixed.put(self._modules(), self._runs)
            for slot, other in self._held.items():
                self._fill(slot, other)
        for name, parameter in adapters.named_adapter_parameters(self._loaded().experts).items():
            if self._model.compile:
                parameter.data.copy_(held.state[name])
            else:
                parameter.data = held.state[name]
        for layer in self._layers().values():
            layer.scaling[adapters.ADAPTER] = held.lora.alpha / held.lora.rank
        self._live = held

    def _fill(self, slot: int, held: _Held) -> None:
        rank = mixed.bucket(held.lora.rank)
        self._held[slot] = held
        for name, layer in self._layers().items():
            down, up = (held.state[f"{name}.lora_{part}.weight"] for part in "AB")
            mixed.fill(layer, slot, (down, up, held.lora.alpha / held.lora.rank), rank if self.stacks else 0)

    def _modules(self) -> Iterator[nn.Module]:
        for expert in self._loaded().experts.values():
            yield from expert.modules()

    def _layers(self) -> dict[str, Any]:
        """The adapted linears by published name."""
        return {
            f"{component}.{name}": module
            for component, expert in self._loaded().experts.items()
            for name, module in expert.named_modules()
            if isinstance(module, BaseTunerLayer)
        }


def _alike(one: LoraSpec, other: LoraSpec) -> bool:
    return (one.rank, one.alpha) == (other.rank, other.alpha)
