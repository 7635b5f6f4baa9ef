"""vLLM engine: `LLMEngine` in this process, stepped on the engine's own thread.

Sequences of all requests share vLLM's batches: a request adds its own between two steps, and a sequence that has ended
leaves room for the next. Weights change in place, on the same thread, while nothing samples. vLLM's cache of prompts
under the old weights is then dropped.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig

from flowfleet.models.registry import family_of, sequence_adapter_for
from flowfleet.models.sequences.adapter import SequenceAdapter
from flowfleet.models.sequences.prompts import EncodedPrompt
from flowfleet.process.pulse import Pulse
from flowfleet.proto.rollout_pb2 import Bucket, LoraSpec, ModelSpec
from flowfleet.weights import lora as adapters
from flowfleet.weights import weights
from services.rollout.engines.base import Cancelled, GeneratedBatch, GenerationRequest
from services.rollout.engines.local import ThreadedEngine, copied, receive_into
from services.rollout.engines.tokens import TokenSampler
from services.rollout.engines.vllm import launch
from services.rollout.engines.vllm_omni.parameters import fill_dummy

THINKERS: Final = ("Qwen3OmniMoeThinkerForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration")
FAMILIES: Final = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", *THINKERS)
"""Models that are sampled here."""
_TURN_S: Final = 0.02
"""Seconds of steps before the thread looks for other requests."""

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
Outcome = tuple["_Asked", GeneratedBatch | BaseException]


class _Asked:
    """A request between the caller's event loop and the engine's thread."""

    def __init__(self, running: Any) -> None:
        self.running = running
        self.outcomes: asyncio.Queue[GeneratedBatch | BaseException] = asyncio.Queue()


class VllmEngine(ThreadedEngine):
    """`max_batch` is the most sequences of one forward; `threads` the CPU threads of torch, None for its default;
    `memory` the share of an accelerator's memory that vLLM may fill.

    Raises ValueError where vLLM is not installed, and for a device that it could not take.
    """

    name = "vllm"

    def __init__(
        self,
        device: torch.device,
        *,
        max_batch: int,
        threads: int | None = None,
        memory: float = 0.9,
        pulse: Pulse | None = None,
    ) -> None:
        launch.require_installed()
        if device.index:
            raise ValueError(f"the vllm engine uses the first visible device, not {device}: make only that one visible")
        super().__init__(device, max_batch, threads, pulse)
        self._memory = memory
        self._adapter: SequenceAdapter | None = None
        """Encodes prompts and names weights; its own parameters are on the meta device."""
        self._is_thinker = False
        self._llm: Any = None
        self._live: Any = None
        """The installed adapter, a `LiveAdapter`."""
        self._asked: list[_Asked] = []
        """Requests under way, on the engine's thread."""
        self._pump: asyncio.Task[None] | None = None
        """Runs while there are requests under way, on the event loop."""
        self._is_broken = False

    async def generate(
        self, request: GenerationRequest, cancelled: Callable[[], bool]
    ) -> AsyncGenerator[GeneratedBatch, None]:
        asked = await self._run(self.pulse.work("encode", len(request.groups)), self._begin, request, cancelled)
        is_whole = False
        try:
            if self._pump is None:
                self._pump = asyncio.create_task(self._step_while_asked(), name="vllm")
            for _ in request.groups:
                outcome = await asked.outcomes.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
            is_whole = True
        finally:
            if not is_whole:
                self._thread.submit(self._abandon, asked)

    @property
    def is_stuck(self) -> bool:
        return super().is_stuck or self._is_broken

    async def close(self) -> None:
        await self._run(self.pulse.work("close", patient=True), self._stop)
        await super().close()

    # On the event loop ------------------------------------------------------------------------------------------------

    async def _step_while_asked(self) -> None:
        try:
            while self._asked:
                for asked, outcome in await self._run(self.pulse.work("tokens"), self._turn):
                    asked.outcomes.put_nowait(outcome)
        finally:
            self._pump = None

    # On the engine's thread: sequences --------------------------------------------------------------------------------

    def _begin(self, request: GenerationRequest, cancelled: Callable[[], bool]) -> _Asked:
        from services.rollout.engines.vllm import sequences

        assert self._adapter is not None, "prepare comes first"
        sequences.settings_of(request)
        prompts = TokenSampler(self._adapter).encode(request)
        sequences.check(request, prompts, self._llm.model_config.max_model_len)
        if cancelled():
            raise Cancelled
        running = sequences.Running(request, prompts, cancelled)
        asked = _Asked(running)
        self._asked.append(asked)
        try:
            self._add(asked)
        except BaseException:
            self._abandon(asked)
            raise
        return asked

    def _add(self, asked: _Asked) -> None:
        """Gives all sequences of a request to vLLM."""
        from services.rollout.engines.vllm import sequences
        from services.rollout.engines.vllm.adapter import REQUEST

        assert self._adapter is not None, "prepare comes first"
        request, running = asked.running.request, asked.running
        for group in request.groups:
            prompt = self._prompt(running.prompts[group.group])
            for position, seed in enumerate(group.seeds):
                name = uuid.uuid4().hex
                running.waiting[name] = (group.group, position)
                self._llm.add_request(
                    name,
                    prompt,
                    sequences.parameters(request, self._adapter, seed),
                    lora_request=None if self._live is None else REQUEST,
                )

    def _prompt(self, prompt: EncodedPrompt) -> Any:
        if self._is_thinker:
            from services.rollout.engines.vllm.thinker import prompt_of

            return prompt_of(prompt, launch.worker_of(self._llm).model_runner.model.config)
        from vllm.inputs import tokens_input

        return tokens_input(prompt.token_ids.tolist())

    def _turn(self) -> list[Outcome]:
        """Makes steps until something comes out, or for `_TURN_S`."""
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + _TURN_S
        while not outcomes and self._asked:
            self.pulse.beat()
            try:
                for asked in [call for call in self._asked if call.running.cancelled()]:
                    self._abandon(asked)
                    outcomes.append((asked, Cancelled()))
                outcomes += self._step()
            except Exception as error:
                self._is_broken = True
                outcomes += [(asked, error) for asked in self._asked]
                self._asked.clear()
            if time.monotonic() > deadline:
                break
        return outcomes

    def _step(self) -> list[Outcome]:
        assert self._adapter is not None, "there are requests"
        began = time.perf_counter()
        for output in self._llm.step():
            asked = next((call for call in self._asked if output.request_id in call.running.waiting), None)
            if output.finished and asked is not None:
                asked.running.take(output.request_id, output)
        seconds, live = time.perf_counter() - began, sum(len(asked.running.waiting) for asked in self._asked)
        outcomes: list[Outcome] = []
        for asked in list(self._asked):
            asked.running.seconds += seconds * len(asked.running.waiting) / max(live, 1)
            outcomes += [(asked, batch) for batch in asked.running.complete(self._adapter)]
            if not asked.running.waiting:
                self._asked.remove(asked)
        return outcomes

    def _abandon(self, asked: _Asked) -> None:
        """Ends the remaining sequences of a request."""
        if asked in self._asked:
            self._asked.remove(asked)
            self._llm.abort_request(list(asked.running.waiting))

    # On the engine's thread: weights ----------------------------------------------------------------------------------

    def _prepare(self, model: ModelSpec, lora: LoraSpec | None) -> None:
        if self._llm is None or self._model != model or self._lora != lora:
            self._start(model, lora)

    def _start(self, model: ModelSpec, lora: LoraSpec | None) -> None:
        """Another model or another shape of its adapter is another vLLM."""
        family = family_of(model.path)
        self._require_sampled(model, family, family.pipeline in FAMILIES)
        self._require_plain(model)
        self._stop()
        self.pulse.reset()
        adapter = sequence_adapter_for(model.path).load(
            model.path, dtype=weights.dtype_of(model.dtype), device=self.device, load_format="empty"
        )
        if model.load_format != "dummy" and (Path(model.path) / "generation_config.json").is_file():
            adapter.transformer.generation_config = GenerationConfig.from_pretrained(model.path, local_files_only=True)
        shapes = _shapes(adapter, lora)
        log.info("starting vLLM with %s in %s on %s", model.path, model.dtype, self.device)
        try:
            self._llm = launch.start(
                model,
                lora,
                self.device,
                max_batch=self._max_batch,
                memory=self._memory,
                records_experts=bool(adapter.routing.num_layers),
                is_thinker=family.pipeline in THINKERS,
                undrawn=adapter.undrawn_ids,
            )
            self._adapter, self._is_thinker = adapter, family.pipeline in THINKERS
            base = self._base()
            if model.load_format == "dummy":
                fill_dummy(base)
            if lora is not None:
                from services.rollout.engines.vllm.adapter import LiveAdapter

                manager = launch.worker_of(self._llm).model_runner.lora_manager._adapter_manager
                self._live = LiveAdapter(manager, lora, shapes, self._renames(), self.device)
        except BaseException:
            self._stop()
            raise
        self._model, self._lora = copied(model), None if lora is None else copied(lora)

    def _stop(self) -> None:
        llm, self._llm = self._llm, None
        self._model = self._lora = self._adapter = self._live = None
        if llm is not None:
            launch.stop(llm)

    def _base(self) -> dict[str, Tensor]:
        """The live base weights by the names that they travel under."""
        from services.rollout.engines.vllm.parameters import live_parameters

        assert self._adapter is not None, "prepare comes first"
        model = launch.worker_of(self._llm).model_runner.model
        return live_parameters(model, weights.full_parameters(self._adapter.experts), self._renames())

    def _renames(self) -> Mapping[str, str]:
        if not self._is_thinker:
            return {}
        from services.rollout.engines.vllm.thinker import renames

        assert self._adapter is not None, "prepare comes first"
        return renames(self._adapter.transformer)

    def _load_adapter(self, state: Mapping[str, Tensor]) -> None:
        assert self._live is not None, "prepare with an adapter comes first"
        adapters.copy_adapter(self._live.published, state)
        self._bind()

    def _receive(self, member: weights.Member, buckets: Sequence[Bucket]) -> None:
        target = self._live_weights() if self._live is None else self._live.published
        weights.require_every_weight(target, buckets)
        if self._live is None:
            self._model = None  # The base differs from the disk: the next job loads it again.
        receive_into(target, member, buckets, self.pulse.beat)
        self._bind()

    def _bind(self) -> None:
        """Puts a received adapter into the layers, and drops vLLM's cache of prompts under other weights."""
        if self._live is not None:
            self._live.bind()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM still has sequences: weights change while none runs")
        if self._is_thinker:
            self._llm.reset_encoder_cache()

    def _verify(self, hashes: Mapping[str, int]) -> str:
        return weights.verify(self._live_weights(), hashes)

    def _live_weights(self) -> Mapping[str, Tensor]:
        """Returns the parameters that an update overwrites, as the layers hold them, by the update's names."""
        if self._live is None:
            return self._base()
        live: Mapping[str, Tensor] = self._live.live()
        return live


def _shapes(adapter: SequenceAdapter, lora: LoraSpec | None) -> dict[str, Tensor]:
    """The adapter's tensors, empty, by published name. Raises ValueError for a target that the model does not have."""
    if lora is None:
        return {}
    tensors: dict[str, Tensor] = dict(adapters.inject_lora(adapter.experts, lora))
    adapters.remove_lora(adapter.experts)
    return tensors
