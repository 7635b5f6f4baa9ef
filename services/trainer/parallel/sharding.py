"""FSDP2 as the trainer uses it: spreads a transformer over the ranks, and gives this rank's shards as plain tensors.

Each rank holds its rows of every parameter, and gathers a block's parameters when it computes. A parameter that every
rank holds whole (replicated.py) is a DTensor on a mesh of replicas with one shard each, so that checkpoints and
optimizer treat both alike.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from flowfleet.models.trainable import blocks_of
from services.trainer.parallel.ranks import Ranks


def shard_expert(expert: nn.Module, ranks: Ranks, dtype: torch.dtype, replicate: int = 1) -> None:
    """Collective. Makes each block of a transformer an FSDP unit and the rest another, in place. With `replicate`
    copies of the weights a rank gathers those of its own copy alone (HSDP).

    Parameters are gathered in `dtype` and gradients reduced in fp32. Parameters may be on the meta device; `allocate`
    comes next then. Raises ValueError for a transformer that does not say what its blocks are.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    shape = (replicate, ranks.world_size // replicate)[replicate == 1 :]
    settings: Any = {"mesh": _mesh(ranks.device.type, shape), "mp_policy": policy}
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    for block in blocks_of(expert):
        fully_shard(block, **settings)
    fully_shard(expert, **settings)


def replicate(tensor: Tensor, ranks: Ranks) -> DTensor:
    """A tensor that every rank holds whole, on its memory, which may be the host's."""
    shape = (ranks.world_size, 1) if ranks.world_size > 1 else (1,)
    placements = [Replicate(), Shard(0)][-len(shape) :]
    return DTensor.from_local(tensor, _mesh(tensor.device.type, shape), placements, run_check=False)


def grad_of(parameter: Tensor) -> Tensor | None:
    """The gradient that `give_grad` or FSDP gave."""
    far: Tensor | None = getattr(parameter, "far_grad", None)
    return parameter.grad if far is None else far


def give_grad(parameter: Any, grad: Tensor | None) -> None:
    """Sets the gradient, which may lie on another device than the parameter."""
    is_far = grad is not None and grad.device != parameter.device
    parameter.grad, parameter.far_grad = (None, grad) if is_far else (grad, None)


def allocate(expert: nn.Module, device: torch.device) -> None:
    """Gives parameters on the meta device memory on `device`, whose content is yet to be given; moves buffers there."""
    module: Any = expert
    module._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))


def num_shards(tensor: Tensor) -> int:
    """Ranks that hold its rows together; 1 for one that every rank holds whole."""
    return tensor.device_mesh.size(-1) if isinstance(tensor, DTensor) else 1


def own_rows(tensor: Tensor) -> slice:
    """The rows that this rank's shard holds: equal shares rounded up, fewer or none for the last."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    share = -(-len(tensor) // num_shards(tensor))
    rank = tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1)
    return slice(min(rank * share, len(tensor)), min((rank + 1) * share, len(tensor)))


def reshard(experts: Mapping[str, nn.Module]) -> None:
    """Frees gathered parameters, which a forward without backward leaves, so that the model holds its shards."""
    for expert in experts.values():
        for module in expert.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, detached, on the parameter's own memory."""
    plain: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return plain.detach()


def like(parameter: DTensor, shard: Tensor) -> DTensor:
    """`shard` as this rank's part of a tensor that is spread as `parameter` is: over its rows, whatever a row is. It
    may be in host memory."""
    mesh = parameter.device_mesh
    if shard.device.type != mesh.device_type:  # DTensor would move the shard to the mesh's devices
        mesh = _mesh(shard.device.type, tuple(mesh.shape))
    shape = torch.Size((*parameter.shape[:1], *shard.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(shard, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


@cache
def _mesh(device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    """Its last dimension is the shards', the one before it the replicas'."""
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


@contextmanager
def exchanged(trained: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[None]:
    """Swaps the shards of `others` (of any dtype) into the trained parameters inside. Afterwards these hold their own
    again, bit for bit.

    Others of the trained dtype hold the trained shards meanwhile, so that a swap takes room for one tensor. Others of
    another dtype would round them, so the trained shards are kept. Nothing may be gathered at either end.
    """
    kept: dict[str, Tensor | None] = {}
    try:
        for name, parameter in trained.items():
            kept[name] = _exchange(local(parameter), others[name])
        yield
    finally:
        for name, saved in kept.items():
            if saved is None:
                _exchange(local(trained[name]), others[name])
            else:
                local(trained[name]).copy_(saved)


def _exchange(shard: Tensor, other: Tensor) -> Tensor | None:
    """Gives a shard the values of `other`. Returns what it held, or None if `other` holds that now."""
    saved = shard.clone()
    shard.copy_(other)
    if shard.dtype != other.dtype:
        return saved
    other.copy_(saved)
    return None
