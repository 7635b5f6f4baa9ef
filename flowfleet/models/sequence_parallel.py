"""Ulysses sequence parallelism by diffusers: several devices share a forward, https://arxiv.org/abs/2309.14509.

Every rank holds all weights, or its shards, and is called with the same arguments. Inside the transformer's blocks each
rank has its share of a sample's tokens; for self-attention an all-to-all gives it all tokens of its share of the heads.
After the last projection the shares are gathered, so that every rank returns the whole velocity. In the backward a rank
keeps its share of the velocity's gradient, so each weight's gradient is its share of the sum over the ranks.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as funcol
from diffusers import ContextParallelConfig, ParallelConfig
from diffusers.hooks import apply_context_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import ModelFamily
from flowfleet.models.settings import Size
from flowfleet.models.token_plan import TokenPlan


def num_heads(family: type[ModelAdapter], path: str | Path) -> dict[str, set[int]]:
    """Numbers of attention heads of each transformer of a checkpoint, from its configuration alone."""
    files = {name: Path(path, name, "config.json") for name in family.parts["transformer"]}
    configs = {name: json.loads(file.read_bytes()) for name, file in files.items() if file.is_file()}
    kinds = ("num_attention_heads", "audio_num_attention_heads")
    return {name: {config[kind] for kind in kinds if kind in config} for name, config in configs.items()}


def require_model(family: ModelFamily, path: str | Path, degree: int, setting: str) -> None:
    """Raises ValueError for a family whose tokens devices cannot share, or attention heads that `degree` devices cannot
    share evenly. `setting`: where the degree is set."""
    if not family.shares_tokens:
        raise ValueError(
            f"{family.title} cannot split a sample over {degree} devices: set {setting} to 1 for this model"
        )
    for name, numbers in num_heads(family.load(), path).items():
        for number in numbers:
            if number % degree:
                raise ValueError(
                    f"{degree} devices cannot share the {number} attention heads of {name}: choose a {setting} that "
                    "divides them"
                )


def require_tokens(adapter: ModelAdapter, size: Size, degree: int, setting: str) -> None:
    """Raises ValueError for a size whose tokens `degree` devices cannot share evenly."""
    for tokens in adapter.shared_tokens(size):
        if tokens % degree:
            raise ValueError(
                f"{degree} devices cannot share {tokens} tokens evenly: choose a height, width or num_frames that "
                f"makes a multiple of {degree}, or another {setting}"
            )


def mesh_of(device_type: str, world_size: int, degree: int) -> DeviceMesh:
    """Collective over torch's default group, whose consecutive ranks share samples. Those that share this rank's."""
    shape = world_size // degree, 1, degree
    return init_device_mesh(device_type, shape, mesh_dim_names=("samples", "ring", "ulysses"))["ring", "ulysses"]


def plan_of(adapter: ModelAdapter, expert: Any) -> TokenPlan:
    """How devices share the tokens of one of a family's transformers."""
    return adapter.token_plan or TokenPlan(expert._cp_plan)


def split(adapter: ModelAdapter, mesh: DeviceMesh, device: torch.device) -> None:
    """Splits the forwards of diffusers' transformers over a mesh of `mesh_of`, in place. From then on its ranks call
    each forward at the same time with the same arguments.

    It does what `enable_parallelism` does, which counts accelerators and so does not work on CPUs.
    """
    degree = mesh.size()
    context = ContextParallelConfig(ulysses_degree=degree, mesh=mesh)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(mesh["ulysses"].get_local_rank(), degree, device, mesh=mesh)
    experts: Mapping[str, Any] = adapter.experts
    for expert in experts.values():
        plan = plan_of(adapter, expert)
        for path, module in expert.named_modules():
            name, processor = path.rpartition(".")[2], getattr(module, "processor", None)
            if name in plan.gathered_keys:
                module.register_forward_pre_hook(partial(_gather_keys, mesh["ulysses"]), with_kwargs=True)
            elif name not in plan.whole_keys and hasattr(processor, "_parallel_config"):
                cast(Any, processor)._parallel_config = config
        apply_context_parallel(expert, context, dict(plan.modules))
    adapter.token_multiple, adapter.joins_branches = degree, False


def _gather_keys(
    mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives an attention layer all tokens that it attends to. Each rank's gradient of a share counts."""
    shares = kwargs["encoder_hidden_states"], *kwargs["key_rotary_emb"]
    tokens, *rotary = (funcol.all_gather_tensor_autograd(share.contiguous(), share.ndim - 2, mesh) for share in shares)
    return args, {**kwargs, "encoder_hidden_states": tokens, "key_rotary_emb": tuple(rotary)}
