"""`trainer.backend = "veomni"`: models that write text, as VeOmni patches and parallelizes them.

https://github.com/ByteDance-Seed/VeOmni. Its modules keep transformers' names and stored layout. On accelerators they
compute with VeOmni's kernels, on CPUs with plain operators. It needs an environment of its own, with an older
transformers (requirements/veomni.txt).
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowfleet.hardware import devices
from flowfleet.models.empty import empty_model
from services.trainer.parallel.mesh import Mesh
from services.trainer.parallel.ranks import Ranks
from services.trainer.parallel.sharding import shard_expert

try:
    from veomni.arguments.arguments_types import OpsImplementationConfig
    from veomni.distributed.parallel_state import init_parallel_state
    from veomni.distributed.torch_parallelize import MixedPrecisionConfig, build_parallelize_model
    from veomni.models import build_foundation_model
except ImportError as error:
    raise ValueError(
        f'trainer.backend = "veomni": {error}; start trainers with a Python that has requirements/veomni.txt '
        "(flowfleet up --trainer-python), or leave trainer.backend out"
    ) from error

_ATTENTION = ("attn_implementation", "qat_implementation")
_started = False


class Veomni:
    """See `Backend`."""

    def load(self, family: Any, folder: Path, dtype: torch.dtype, ranks: Ranks) -> Any:
        _start(ranks)
        names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
        ops = _operators(ranks.device)
        try:
            model = empty_model(
                lambda: build_foundation_model(
                    str(folder), torch_dtype=names[dtype], init_device="cpu", ops_implementation=ops
                ),
                dtype,
            )
        except (ValueError, ImportError) as error:
            raise ValueError(
                f'trainer.backend = "veomni" cannot make a {family.model_class.__name__}: {error}; leave it out'
            ) from error
        return family(model, None, dtype=dtype, device=torch.device("cpu"))

    def shard(self, expert: nn.Module, ranks: Ranks, dtype: torch.dtype, mesh: Mesh) -> None:
        if ranks.world_size == 1:  # VeOmni spreads nothing then, but wants weights at once
            shard_expert(expert, ranks, dtype)
            return
        build_parallelize_model(
            expert,
            init_device="meta",
            mixed_precision=MixedPrecisionConfig(enable=dtype != torch.float32, param_dtype=str(dtype)[6:]),
            enable_gradient_checkpointing=False,
            should_skip_hf_weight_load=True,
        )


def _start(ranks: Ranks) -> None:
    """VeOmni's mesh of the ranks, once a process."""
    global _started
    if not _started:
        size = ranks.world_size
        init_parallel_state(dp_size=size, dp_shard_size=size, extra_parallel_sizes=(1,), device_type=ranks.device.type)
        _started = True


def _operators(device: torch.device) -> Any:
    """VeOmni's choice of kernels; plain ones on CPUs."""
    if devices.is_accelerator(device):
        return OpsImplementationConfig()
    names = [field.name for field in dataclasses.fields(OpsImplementationConfig)]
    plain = {name: "eager" for name in names if name.endswith("implementation") and name not in _ATTENTION}
    return OpsImplementationConfig(attn_implementation="sdpa", **plain)
