"""One forward on several devices: Ulysses sequence parallelism, https://arxiv.org/abs/2309.14509, by diffusers.

Every rank holds all weights and is called with the same arguments. Inside the transformer's blocks each rank has its
share of a sample's tokens; for self-attention an all-to-all gives it all tokens of its share of the heads. After the
last projection the shares are gathered, so that every rank returns the whole velocity.

The ranks are those of torch's default group.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, ParallelConfig
from diffusers.hooks import apply_context_parallel
from diffusers.hooks.context_parallel import remove_context_parallel
from torch.distributed.device_mesh import init_device_mesh

from flowfleet.models.base import ModelAdapter
from flowfleet.models.settings import Size


def require_splittable(adapter: ModelAdapter, degree: int) -> None:
    """Raises ValueError for a family whose tokens cannot be split, and heads that `degree` devices cannot share."""
    if adapter.sequence_patch is None:
        raise ValueError(
            f"{type(adapter).__name__} cannot split a sample over {degree} devices: give rollouts of this model one "
            "device each (--sequence-parallel-size 1)"
        )
    experts: Mapping[str, Any] = adapter.experts
    for name, expert in experts.items():
        heads = expert.config.num_attention_heads
        if heads % degree:
            raise ValueError(
                f"{degree} devices cannot share the {heads} attention heads of {name}: choose a "
                "--sequence-parallel-size that divides them"
            )


def require_tokens(adapter: ModelAdapter, size: Size, degree: int) -> None:
    """Raises ValueError for a size whose tokens `degree` devices cannot share evenly."""
    tokens = num_tokens(adapter, size)
    if tokens % degree:
        raise ValueError(
            f"{degree} devices cannot share {tokens} tokens evenly: choose a height, width or num_frames that makes a "
            f"multiple of {degree}, or another --sequence-parallel-size"
        )


def num_tokens(adapter: ModelAdapter, size: Size) -> int:
    """Tokens of one sample of a family that can split them."""
    assert adapter.sequence_patch is not None
    return prod(adapter.latent_shape(size)[1:]) // adapter.sequence_patch


def split(experts: Mapping[str, Any], device: torch.device) -> None:
    """Splits the forwards of diffusers' transformers over all ranks, in place. Every rank calls it, and from then on
    calls each forward at the same time with the same arguments.

    It does what `enable_parallelism` does, which counts accelerators and so does not work on CPUs.
    """
    size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (1, size), mesh_dim_names=("ring", "ulysses"))
    context = ContextParallelConfig(ulysses_degree=size, mesh=mesh)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(dist.get_rank(), size, device, mesh=mesh)
    for expert in experts.values():
        _set_config(expert, config)
        apply_context_parallel(expert, context, expert._cp_plan)


def join(experts: Mapping[str, Any]) -> None:
    """Undoes `split`."""
    for expert in experts.values():
        _set_config(expert, None)
        remove_context_parallel(expert, expert._cp_plan)


def _set_config(expert: Any, config: ParallelConfig | None) -> None:
    """Tells attention between tokens of a sample whether these are split."""
    for module in expert.modules():
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "_parallel_config"):
            processor._parallel_config = config
