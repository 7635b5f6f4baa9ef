"""Training engines (`trainer.backend`): how a policy's modules are made and spread over the ranks.

Everything else is common: what the adapter of the family computes, losses, optimizer, publishing and checkpoints go by
parameters with the checkpoint's names, which are spread by rows (parallel/sharding.py).
"""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from flowfleet.job.spec import JobSpec
from services.trainer.parallel.mesh import Mesh
from services.trainer.parallel.ranks import Ranks


class Backend(Protocol):
    """A training engine. Which jobs each trains is a rule of job files (flowfleet/job/rules/trainer.py)."""

    def load(self, family: Any, folder: Path, dtype: torch.dtype, ranks: Ranks) -> Any:
        """The adapter of a checkpoint whose transformers have no weights yet: parameters of `dtype` on the meta device,
        named as published. `family`: the class of the adapter."""

    def shard(self, expert: nn.Module, ranks: Ranks, dtype: torch.dtype, mesh: Mesh) -> None:
        """Collective. Spreads the parameters over the ranks by rows, in place, still without weights. A forward gathers
        them in `dtype`, and a backward sums gradients in fp32."""


def backend_of(spec: JobSpec) -> Backend:
    """The engine that a job names. Raises ValueError for one that is not installed here."""
    if spec.trainer.backend == "fsdp":
        from services.trainer.model.backends.fsdp import Fsdp

        return Fsdp()
    from services.trainer.model.backends.veomni import Veomni

    return Veomni()
