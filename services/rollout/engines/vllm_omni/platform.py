"""vLLM-Omni's platform for CPUs, which it does not bring itself: one device, no streams, no pools, no inductor."""

from typing import Any

import psutil
import torch
from vllm.config.kernel import IrOpPriorityConfig
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


def _always(answer: Any) -> Any:
    """A class method with this answer, whatever it is asked about."""
    return classmethod(lambda cls, *_, **__: answer)


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    get_device_version = set_device = synchronize = empty_cache = reset_peak_memory_stats = _always(None)
    supports_torch_inductor = supports_cpu_offload = _always(False)
    max_memory_allocated = max_memory_reserved = memory_allocated = memory_reserved = _always(0)

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        return "services.rollout.engines.vllm_omni.attention.CpuSDPABackend"

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: Any) -> Any:
        return IrOpPriorityConfig.with_default(["native"])

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"
