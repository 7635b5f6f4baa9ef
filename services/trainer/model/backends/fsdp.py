"""`trainer.backend = "fsdp"`: the libraries' own modules under PyTorch's FSDP2."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from services.trainer.parallel.mesh import Mesh
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import shard_expert


class Fsdp:
    """See `Backend`."""

    def load(self, family: Any, folder: Path, dtype: torch.dtype, ranks: Ranks) -> Any:
        return family.load(folder, dtype=dtype, device="cpu", components=("transformer",), load_format="empty")

    def shard(self, expert: nn.Module, ranks: Ranks, dtype: torch.dtype, mesh: Mesh) -> None:
        shard_expert(expert, ranks, dtype, mesh.replicate)
