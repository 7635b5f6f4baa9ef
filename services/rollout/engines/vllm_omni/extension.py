"""The worker's side: loading, weight updates and sampling, on the thread that vLLM-Omni computes on.

The engine calls `perform` by vLLM-Omni's `collective_rpc` with a task, which calls a method here; sampling tasks come
as requests instead, through vLLM-Omni's scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from flowfleet.models.registry import family_of
from flowfleet.proto.rollout_pb2 import Bucket, LoraSpec, ModelSpec
from flowfleet.weights import weights
from flowfleet.weights.lora import copy_adapter
from services.rollout.engines import acceleration
from services.rollout.engines.base import GenerationRequest
from services.rollout.engines.local import load_format, receive_into
from services.rollout.engines.prompts import Encoded
from services.rollout.engines.vllm_omni import parameters
from services.rollout.engines.vllm_omni.adapter import LiveAdapter
from services.rollout.engines.vllm_omni.compiled_lora import merge, prepare_layers
from services.rollout.engines.vllm_omni.pipelines.base import RolloutPipeline
from services.rollout.engines.vllm_omni.task import Task


class RolloutWorkerExtension(CustomPipelineWorkerExtension):
    """Mixed into vLLM-Omni's worker. Every method raises ValueError for what the caller can change."""

    _adapter: LiveAdapter | None = None

    def perform(self, task: Task[Any]) -> None:
        """Runs a task of the engine's."""
        task.run(self)

    def load(self, model: ModelSpec) -> None:
        """Everything but the transformers' modules, which are there: text encoder, VAE, all weights."""
        pipeline = self._pipeline
        adapter = (
            family_of(model.path)
            .load()
            .load(
                model.path,
                dtype=weights.dtype_of(model.dtype),
                device=pipeline.device,
                components=("text_encoder", "vae"),
                load_format=load_format(model),
            )
        )
        adapter.limit_tokens(model.max_sequence_length or None)
        pipeline.attach(adapter)
        parameters.require_dtype(self._base(), weights.dtype_of(model.dtype))
        self._fill(model)
        acceleration.accelerate(pipeline.experts, compile=model.compile, quantization=model.quantization)

    def load_base(self, model: ModelSpec) -> None:
        """The transformers' weights as they were before training."""
        self._fill(model)
        acceleration.refresh(self._pipeline.experts)

    def install(self, lora: LoraSpec | None) -> None:
        """Puts LoRA layers in, in place of those that are there; None leaves none."""
        if self._adapter is not None:
            self._adapter.remove()
            self._adapter = None
            self._renew_lora_manager()
        if lora is not None:
            try:
                self._adapter = LiveAdapter(self._pipeline, self._lora_manager(), lora, self._base())
                prepare_layers(self._lora_layers(), merged=lora.merged)
                merge(self._lora_layers())
            except BaseException:
                self._renew_lora_manager()
                raise

    def encode(self, request: GenerationRequest) -> Encoded:
        """See `PromptEncoder.encode`."""
        return self._pipeline.sampler.encode(request)

    def load_adapter(self, state: Mapping[str, Tensor]) -> None:
        """A whole adapter, as published."""
        assert self._adapter is not None, "install comes first"
        copy_adapter(self._adapter.published, state)
        self._bind(self._adapter)

    def expect(self, buckets: Sequence[Bucket]) -> None:
        """Raises ValueError unless the buckets hold every weight of an update once."""
        weights.require_every_weight(self._received(), buckets)

    def receive(self, member: weights.Member, buckets: Sequence[Bucket], beat: Callable[[], None]) -> None:
        """Receives each bucket into the live weights; `beat` is called for each parameter."""
        receive_into(self._received(), member, buckets, beat)
        if self._adapter is not None:
            self._bind(self._adapter)

    def verify(self, hashes: Mapping[str, int]) -> str:
        """Verifies the weights that the forward uses before their float8 copies are made; see
        `RolloutEngine.verify`."""
        if self._adapter is not None:
            return weights.verify(self._adapter.live(), hashes)
        digest = weights.verify(self._base(), hashes)
        acceleration.refresh(self._pipeline.experts)
        return digest

    def _bind(self, adapter: LiveAdapter) -> None:
        adapter.bind()
        merge(self._lora_layers())

    def _fill(self, model: ModelSpec) -> None:
        if model.load_format == "dummy":
            parameters.fill_dummy(self._base())
        else:
            experts = self._pipeline.experts
            parameters.fill_from_folder(self._base(), parameters.stored_buffers(experts), model.path, list(experts))

    def _received(self) -> dict[str, Tensor]:
        """Returns the tensors that an update is copied into."""
        return self._base() if self._adapter is None else self._adapter.published

    def _base(self) -> dict[str, Tensor]:
        return parameters.live_parameters(self._pipeline.experts, self._pipeline.renames)

    @property
    def _pipeline(self) -> RolloutPipeline:
        worker: Any = self
        pipeline: RolloutPipeline = worker.model_runner.pipeline
        return pipeline

    def _lora_layers(self) -> list[nn.Module]:
        return list(self._lora_manager()._lora_modules.values())

    def _lora_manager(self) -> Any:
        worker: Any = self
        return worker.lora_manager

    def _renew_lora_manager(self) -> None:
        """Makes a LoRA manager that knows the layers as they are now."""
        worker: Any = self
        worker.init_lora_manager()
