"""What a rank of `test_gather` does. Apart from the tests, so that its process does not import what only they need."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flowfleet.weights import weights
from services.trainer.model.gather import Gather

SIZE = 3
CPU = torch.device("cpu")
SHAPES = {
    "even": (12, 4),
    "uneven": (7, 3),
    "two": (2, 5),
    "one": (1, 2, 3),
    "short": (4,),
    "whole": (5, 5),
    "big": (50,),
}


def tensors_of() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def spread(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All but `whole`, by rows."""
    mesh = init_device_mesh("cpu", (SIZE,))
    return {
        name: tensor if name == "whole" else distribute_tensor(tensor, mesh, [Shard(0)])
        for name, tensor in tensors.items()
    }


def no_memory_left(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("too little memory")


def rank_main(rank: int, port: int, results: Any) -> None:
    store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    torch.set_num_threads(1)
    gather = Gather(spread(tensors_of()), torch.bfloat16, CPU, bucket_bytes=150)
    whole = dict(gather.tensors())
    again = Gather(spread(tensors_of()), torch.bfloat16, CPU, bucket_bytes=150)
    if rank == 0:
        first = again.buckets[0]
        flat = torch.empty(weights.bucket_bytes(first), dtype=torch.uint8)
        allocate, torch.empty = torch.empty, no_memory_left  # there was enough for all collectives before the first
        again.fill(first, flat)
        torch.empty = allocate
        whole["first"] = flat
    again.rest()  # the other ranks want nothing of it
    results.put((rank, len(gather.buckets), {name: tensor.float().tolist() for name, tensor in whole.items()}))
    dist.barrier()
    dist.destroy_process_group()
