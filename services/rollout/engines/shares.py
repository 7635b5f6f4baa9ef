"""Devices of a replica that share the weights of a model larger than one of them, and deal the rows of each batch.

Each device keeps its part of every weight, and has a block whole while it computes it (FSDP2; `load_shares`). For
families with `shares_weights`, and adapters alone: these lie whole on every device.
"""

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec


def require_shared(model: ModelSpec, lora: LoraSpec | None) -> None:
    """Raises ValueError for what devices that share weights cannot sample."""
    remedies = {
        'set trainer.mode = "lora", whose adapter each device has whole': lora is None,
        'set rollout.adapter = "separate"': lora is not None and lora.merged,
        "leave rollout.quantization and model.base out": model.quantization not in ("", "none"),
    }
    for remedy, is_needed in remedies.items():
        if is_needed:
            raise ValueError(f"the devices of this replica share the weights of {model.path}: {remedy}")


def deal(expert: nn.Module, mesh: DeviceMesh) -> None:
    """Has each device compute its rows of a forward, in place: arguments are tensors (B, …) by name, and so is the
    output."""
    whole: Any = expert.forward

    def forward(**given: Any) -> Tensor:
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        first = next(iter(tensors.values()))
        count = len(first)
        share = -(-count // mesh.size())
        mine = (torch.arange(share, device=first.device) + share * mesh.get_local_rank()) % count
        output: Tensor = whole(**{**given, **{name: value[mine] for name, value in tensors.items()}})
        gathered: Tensor = funcol.all_gather_tensor(output.contiguous(), 0, mesh)
        return gathered[:count]

    expert.forward = forward
