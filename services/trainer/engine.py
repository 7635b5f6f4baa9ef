"""The model on its ranks: transformer and adapter under FSDP2, AdamW on what is trained.

Only the transformer is loaded. With LoRA the base stays in `model.dtype`, frozen; what is trained, the adapter or
everything, has fp32 masters that FSDP casts to `model.dtype` for the forward and reduces in fp32. Each transformer
block is one FSDP unit and the rest another.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flowfleet import devices, lora, weights
from flowfleet.jobs import JobSpec
from flowfleet.models import ModelAdapter, adapter_for
from flowfleet.proto.rollout_pb2 import LoraSpec
from flowfleet.seeds import derive_seed
from services.trainer.optimizer import ShardedAdamW
from services.trainer.ranks import Ranks

log = logging.getLogger(__name__)


class Engine:
    """The trainable model of a job. Methods marked collective must be called by all ranks alike."""

    adapter: ModelAdapter
    model: Any
    """`adapter.transformer`, sharded."""
    trained: dict[str, Any]
    """Parameters that are trained, by published name: DTensors, fp32."""
    optimizer: ShardedAdamW

    def __init__(self, spec: JobSpec, ranks: Ranks) -> None:
        """Loads the model; `shard` comes next. Raises ValueError for a model, size or target that is not there."""
        self.spec = spec
        self.ranks = ranks
        self.dtype = weights.dtype_of(spec.model.dtype)
        _set_threads(spec, ranks)
        is_lora = spec.trainer.mode == "lora"
        load_dtype = self.dtype if is_lora else torch.float32
        self.adapter = adapter_for(spec.model.path).load(
            spec.model.path, dtype=load_dtype, device="cpu", components=("transformer",)
        )
        self.model = self.adapter.transformer
        if is_lora:
            seed = derive_seed(spec.seed, "lora")
            lora.install_lora(self.model, lora_spec(spec), seed, dtype=torch.float32)
        else:
            self.model.requires_grad_(True)
        if spec.trainer.gradient_checkpointing:
            self.model.enable_gradient_checkpointing()
        self.adapter.latent_shape(spec.rollout.height, spec.rollout.width)

    def shard(self) -> None:
        """Collective. Spreads the model over the ranks' devices and makes the optimizer."""
        self._fully_shard()
        self.adapter.device, self.adapter.dtype = self.ranks.device, self.dtype
        named = lora.named_adapter_parameters if self.is_lora else weights.full_parameters
        self.trained = dict(named(self.model))
        self.optimizer = ShardedAdamW(self.trained, self.spec.trainer.optimizer, self.ranks)

    @property
    def _keeps_gathered(self) -> bool:
        """Whether parameters stay gathered between the forwards of an update: a second copy, which host memory has."""
        return self.ranks.world_size == 1 and not devices.is_accelerator(self.ranks.device)

    @property
    def is_lora(self) -> bool:
        return self.spec.trainer.mode == "lora"

    def set_last_backward(self, is_last: bool) -> None:
        """Before each forward and backward of an update.

        An adapter's gradients are reduced once, at the last; full ones each time, for nobody can keep them unsharded.
        """
        if self.is_lora:
            self.model.set_requires_gradient_sync(is_last)
        if self._keeps_gathered:
            self.model.set_reshard_after_backward(is_last)

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Collective, one parameter a step. What is published: whole tensors in `model.dtype`, by published name."""
        self.reshard()
        for name, parameter in self.trained.items():
            data = parameter.detach()
            yield name, (data.full_tensor() if isinstance(data, DTensor) else data).to(self.dtype)

    def reshard(self) -> None:
        """Frees gathered parameters, which a forward without backward leaves, so that the model holds its shards."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _fully_shard(self) -> None:
        mesh = init_device_mesh(self.ranks.device.type, (self.ranks.world_size,))
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.dtype != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        settings: Any = {
            "mesh": mesh,
            "mp_policy": policy,
            "reshard_after_forward": False if self._keeps_gathered else None,
        }
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
        names = set(self.model._no_split_modules or ())
        for block in [module for module in self.model.modules() if type(module).__name__ in names]:
            fully_shard(block, **settings)
        fully_shard(self.model, **settings)


def lora_spec(spec: JobSpec) -> LoraSpec:
    part = spec.trainer.lora
    return LoraSpec(rank=part.rank, alpha=part.alpha, target_modules=part.target_modules)


def _set_threads(spec: JobSpec, ranks: Ranks) -> None:
    """For the calling thread, which must be the one that computes."""
    torch.set_num_threads(spec.trainer.threads or max(1, (os.cpu_count() or 1) // ranks.world_size))
    if spec.trainer.deterministic and devices.is_accelerator(ranks.device):
        torch.use_deterministic_algorithms(True, warn_only=True)
