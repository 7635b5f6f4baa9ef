"""The rollout's diffusers engine on the frozen base that a rank holds, with an adapter of its own.

Transformers are made again without memory and given the rank's own parameters, so the base is there once. The adapter
lies next to it in `model.dtype`, as every replica has it, and changes when a version is published: an update of the
fp32 masters never reaches a sample. Text encoders and VAE are loaded as in a rollout.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flowfleet.hardware import devices
from flowfleet.models import level_tables
from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import ModelFamily
from flowfleet.process.pulse import Pulse
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from flowfleet.quantization import layers
from flowfleet.quantization.experts import ExpertWeights, adopt
from flowfleet.weights import weights
from services.rollout.engines.base import GeneratedBatch, GenerationRequest
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.engines.loading import load_others
from services.rollout.engines.local import without_threads
from services.rollout.engines.prompts import Encoded
from services.rollout.engines.sampler import Row
from services.trainer.model.engine import Engine, lora_spec, model_spec, num_threads
from services.trainer.model.loading import plain_name
from services.trainer.parallel.sharding import local
from services.trainer.turns import Turns

T = TypeVar("T")
SMALL_DEVICE_BYTES = 48 * 2**30
MAX_BATCH = 256
"""Maximum rows of one forward; the same as a rollout's default."""


class SharingEngine(DiffusersEngine):
    """Samples between the updates of `trained`. `shared` gives the adapter that was gathered last."""

    def __init__(self, trained: Engine, turns: Turns, shared: Callable[[], Mapping[str, Tensor]]) -> None:
        spec, ranks = trained.spec, trained.ranks
        pulse = Pulse(spec.timeouts.hang_s, shared=True)
        super().__init__(ranks.device, max_batch=MAX_BATCH, threads=num_threads(spec, ranks), pulse=pulse)
        self.slots = 0
        self._trained, self._turns, self._shared = trained, turns, shared
        self._is_short = False
        """True once samples had no room next to what updates hold."""
        turns.before_training = self._make_room

    async def prepare(self, model: ModelSpec, lora: LoraSpec | None) -> None:
        spec, trained_model = self._trained.spec, model_spec(self._trained.spec, model.fingerprint)
        trained_model.path = str(self._trained.folder)
        if (without_threads(model), lora) != (trained_model, lora_spec(spec)):
            raise ValueError(f"this replica is a rank of a trainer of {spec.model.path}: it samples for that job alone")
        await super().prepare(model, lora)

    async def load_shared(self) -> None:
        await self.load_adapter(self._shared())

    def _adapter_of(self, model: ModelSpec, family: ModelFamily) -> ModelAdapter:
        dtype, kind = weights.dtype_of(model.dtype), family.load()
        try:
            adapter = load_others(kind, model, self.device)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                'the device has no room for text encoder and VAE: set trainer.samples = "no", or what '
                f"`flowfleet plan` advises ({error})"
            ) from None
        bare: ModelAdapter = kind.load(model.path, dtype=dtype, components=("transformer",), load_format="empty")
        for component, expert in bare.experts.items():
            if kind.level_layers is not None:
                level_tables.share(self._trained.experts[component], expert, kind.level_layers)
            share(self._trained.experts[component], expert)
            setattr(adapter.pipeline, component, expert)
        return adapter

    def _make_room(self) -> None:
        """Frees the memory of samples' graphs, where the device is small: they are captured again."""
        if (devices.memory_bytes(self.device) or SMALL_DEVICE_BYTES) < SMALL_DEVICE_BYTES:
            for graphs in self._graphs:
                graphs.release()

    def _in_room(self, work: Callable[[], T]) -> T:
        """Does the work, which has the same bits when it is repeated, again where memory does not suffice."""
        if self._is_short:
            self._trained.make_room()
        try:
            return work()
        except torch.OutOfMemoryError:
            self._is_short = True
            if not self._trained.make_room():
                raise
        return work()

    def _encode(self, request: GenerationRequest) -> Any:
        with self._turns.sampling(self.pulse.beat):
            return self._in_room(lambda: super(SharingEngine, self)._encode(request))

    def _sample(
        self, request: GenerationRequest, encoded: Encoded, rows: Sequence[Row], checkpoint: Callable[[], None]
    ) -> GeneratedBatch:
        def between_steps() -> None:
            checkpoint()
            self._turns.between_steps(self.pulse.beat)

        def sampled() -> GeneratedBatch:
            return super(SharingEngine, self)._sample(request, encoded, rows, between_steps)

        with self._turns.sampling(self.pulse.beat):
            return self._in_room(sampled)


def share(trained: nn.Module, bare: nn.Module) -> None:
    """Gives a transformer without weights those of a rank's: the same memory, float8 where the rank's base is, without
    the adapter."""
    for name, module in trained.named_modules():
        if isinstance(module, layers.Fp8Base):
            linear = bare.get_submodule(plain_name(f"{name}.").removesuffix("."))
            assert isinstance(linear, nn.Linear)
            layers.adopt(linear, module)
        if isinstance(module, ExpertWeights):
            target = bare.get_submodule(plain_name(f"{name}.").removesuffix("."))
            assert isinstance(target, ExpertWeights)
            adopt(target, module)
    named = chain(trained.named_parameters(remove_duplicate=False), trained.named_buffers(remove_duplicate=False))
    held = {plain_name(name): local(tensor) for name, tensor in named if ".lora_" not in name}
    for prefix, module in bare.named_modules():
        for tensors in (module._parameters, module._buffers):
            for leaf, tensor in tensors.items():
                if tensor is not None:
                    given = held[f"{prefix}.{leaf}" if prefix else leaf]
                    assert given.shape == tensor.shape, "the rank holds the whole base"
                    is_parameter = isinstance(tensor, nn.Parameter)
                    tensors[leaf] = nn.Parameter(given, requires_grad=False) if is_parameter else given
