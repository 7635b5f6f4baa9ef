"""Loads a transformer as each rank of a world that exists by name alone: `-m tests.services.trainer.reading MODEL`.

torch's fake process group lets one process be any rank, for to load takes no communication. Prints a JSON list with an
entry a rank: the elements that it read from files, those of its shards, those of the model, whether every shard holds
its rows, and whether its dummies are the rows of the whole dummies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from flowfleet.models.loading import dummy_parameter
from flowfleet.models.registry import adapter_for
from flowfleet.models.weight_files import weight_files
from services.trainer.beats import Beats
from services.trainer.model.loading import CheckpointSource, DummySource, fill
from services.trainer.parallel.sharding import allocate, local, shard_expert

WORLD_SIZE = 3


class World:
    """What sharding asks of `Ranks`."""

    def __init__(self, rank: int) -> None:
        self.rank, self.world_size, self.device = rank, WORLD_SIZE, torch.device("cpu")
        self.beats = Beats(rank, WORLD_SIZE)


def as_rank(rank: int, path: Path) -> dict[str, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    ranks: Any = World(rank)
    adapter = adapter_for(path).load(path, dtype=torch.float32, components=("transformer",), load_format="empty")
    expert = adapter.transformer.requires_grad_(True)
    source = CheckpointSource(path / "transformer")
    source.check(expert)
    shard_expert(expert, ranks, torch.bfloat16)
    allocate(expert, ranks.device)
    read: list[int] = []
    inner = source.rows

    def rows(*args: Any) -> torch.Tensor:
        part = inner(*args)
        read.append(part.numel())
        return part

    source.rows = rows  # type: ignore[method-assign, assignment]
    fill(expert, source, ranks)
    (file,) = weight_files(path / "transformer")
    whole = load_file(file)
    parameters = dict(expert.named_parameters())
    row = {
        "read": sum(read),
        "shards": sum(local(parameter).numel() for parameter in parameters.values()),
        "model": sum(tensor.numel() for tensor in whole.values()),
        "holds_its_rows": _are_rows(parameters, whole, rank),
    }
    fill(expert, DummySource("transformer", ranks.device), ranks)
    dummies = {
        name: dummy_parameter(f"transformer.{name}", tensor.shape, torch.float32, "cpu")
        for name, tensor in whole.items()
    }
    row["dummies_too"] = _are_rows(parameters, dummies, rank)
    dist.destroy_process_group()
    return row


def _are_rows(parameters: dict[str, Any], whole: dict[str, torch.Tensor], rank: int) -> bool:
    """Compares with `torch.chunk`, which defines how FSDP spreads rows."""
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        chunks = torch.chunk(whole[name], WORLD_SIZE)
        own = chunks[rank] if rank < len(chunks) else whole[name][:0]
        if not torch.equal(local(parameter), own):
            return False
    return len(parameters) == len(whole)


if __name__ == "__main__":
    print(json.dumps([as_rank(rank, Path(sys.argv[1])) for rank in range(WORLD_SIZE)]))
