"""Ulysses sequence parallelism by diffusers: several devices share a forward, https://arxiv.org/abs/2309.14509.

Every rank holds all weights and is called with the same arguments. Inside the transformer's blocks each rank has its
share of a sample's tokens; for self-attention an all-to-all gives it all tokens of its share of the heads. After the
last projection the shares are gathered, so that every rank returns the whole velocity.

The ranks are those of torch's default group.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, ParallelConfig
from diffusers.hooks import apply_context_parallel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flowfleet.hardware import devices
from flowfleet.models.base import ModelAdapter
from flowfleet.models.settings import Size

FLAG = "--sequence-parallel-size"


def require_family(title: str, family: type[ModelAdapter], degree: int) -> None:
    """Raises ValueError for a family, `title` in messages, whose tokens devices cannot share."""
    if family.sequence_patch is None:
        raise ValueError(
            f"{title} cannot split a sample over the {degree} devices of this replica: sample this model "
            f"in a pool of replicas with one device ({FLAG} 1)"
        )


def num_heads(family: type[ModelAdapter], path: str) -> dict[str, int]:
    """Attention heads of each transformer of a checkpoint, from its configuration alone."""
    files = {name: Path(path, name, "config.json") for name in family.parts["transformer"]}
    configs = {name: json.loads(file.read_bytes()) for name, file in files.items() if file.is_file()}
    return {name: config["num_attention_heads"] for name, config in configs.items()}


def require_heads(heads: Mapping[str, int], degree: int) -> None:
    """Raises ValueError for attention heads, by transformer, that `degree` devices cannot share evenly."""
    for name, number in heads.items():
        if number % degree:
            raise ValueError(
                f"{degree} devices cannot share the {number} attention heads of {name}: choose a {FLAG} that divides "
                "them"
            )


def require_targets(experts: Mapping[str, Any], targets: Sequence[str]) -> None:
    """Raises ValueError for a LoRA of a layer at which tokens are split or gathered."""
    for expert in experts.values():
        for name in filter(None, expert._cp_plan):
            if any(name == target or name.endswith(f".{target}") for target in targets):
                raise ValueError(
                    f"trainer.lora.target_modules: {name} cannot be adapted where several devices share a sample: "
                    f"remove it, or sample in a pool of replicas with one device ({FLAG} 1)"
                )


def require_tokens(adapter: ModelAdapter, size: Size, degree: int) -> None:
    """Raises ValueError for a size whose tokens `degree` devices cannot share evenly."""
    assert adapter.sequence_patch is not None
    tokens = prod(adapter.latent_shape(size.whole)[1:]) // adapter.sequence_patch
    if tokens % degree:
        raise ValueError(
            f"{degree} devices of this replica cannot share {tokens} tokens evenly: choose a height, width or "
            f"num_frames that makes a multiple of {degree}, or another {FLAG}"
        )


def meet(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> DeviceMesh:
    """Makes torch's default group of the ranks that share samples. Blocks until all have come."""
    devices.bind(device)
    devices.synchronize(device)  # a mesh chooses a device for a thread that has used none
    dist.init_process_group(devices.backend(device), store=store, rank=rank, world_size=size, timeout=timeout)
    return init_device_mesh(device.type, (1, size), mesh_dim_names=("ring", "ulysses"))


def split(experts: Mapping[str, Any], mesh: DeviceMesh, device: torch.device) -> None:
    """Splits the forwards of diffusers' transformers over all ranks, in place. From then on every rank calls each
    forward at the same time with the same arguments.

    It does what `enable_parallelism` does, which counts accelerators and so does not work on CPUs.
    """
    context = ContextParallelConfig(ulysses_degree=dist.get_world_size(), mesh=mesh)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
    for expert in experts.values():
        for module in expert.modules():
            processor: Any = getattr(module, "processor", None)
            if hasattr(processor, "_parallel_config"):
                processor._parallel_config = config
        apply_context_parallel(expert, context, expert._cp_plan)
