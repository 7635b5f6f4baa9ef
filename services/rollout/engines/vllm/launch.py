"""Starts vLLM in this process. vLLM is not imported before."""

import importlib.util
import logging
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from flowfleet.extras import pip_install
from flowfleet.models.weight_files import TRANSFORMERS, weight_files
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec
from services.rollout.engines.vllm_omni.plugin import set_environment

_CPU_CACHE_BYTES: Final = 2**28
"""Keys and values on a CPU."""
_CPU_LENGTH: Final = 4096
"""Most tokens of a sequence there, its prompt included."""


def require_installed() -> None:
    """Raises ValueError where vLLM is not."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"--engine vllm: vllm is not installed: {pip_install('vllm-omni')} on NVIDIA GPUs, `make vllm-omni` "
            "on CPUs; or give --engine transformers"
        )


def start(
    model: ModelSpec,
    lora: LoraSpec | None,
    device: torch.device,
    *,
    max_batch: int,
    memory: float,
    records_experts: bool,
    is_thinker: bool,
    undrawn: Collection[int],
) -> Any:
    """vLLM's `LLMEngine` with its model in it, and layers for an adapter of this shape. Takes seconds to minutes.

    Args:
        model: a folder that vLLM can load.
        lora: the adapter's rank and targets; None: no adapter.
        device: the CPU, or the first accelerator that this process sees.
        max_batch: most sequences of one forward.
        memory: share of the accelerator's memory that vLLM may fill with weights, keys and values.
        records_experts: whether results hold the experts that each token took.
        is_thinker: whether it is Qwen3-Omni's.
        undrawn: tokens that are never drawn.
    """
    if model.load_format != "dummy":
        weight_files(Path(model.path), TRANSFORMERS)
    set_environment(
        device.type,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # The worker is this process, so weights change in place.
        VLLM_USE_V2_MODEL_RUNNER="0",  # `TemperedSampler` is the first runner's.
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from services.rollout.engines.vllm.log_probs import MODE, TemperedSampler

    logging.getLogger("vllm").setLevel(logging.WARNING)
    options: dict[str, Any] = {}
    if is_thinker:
        _spare_torchvision()
        from services.rollout.engines.vllm import thinker

        thinker.register()
        options |= {"hf_overrides": thinker.configured, "skip_mm_profiling": True, "mm_processor_cache_gb": 0}
    if lora is not None:
        options |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": held_rank(lora.rank)}
        options |= {"lora_target_modules": list(lora.target_modules)}
    if device.type == "cpu":
        from services.rollout.engines.vllm import cpu_kernels

        cpu_kernels.install()
        cpu_kernels.keep_weights()
        options |= {"enforce_eager": True, "compilation_config": {"custom_ops": ["none"]}}
        options |= {"kv_cache_memory_bytes": _CPU_CACHE_BYTES, "max_model_len": _length(model.path)}
    else:
        options |= {"moe_backend": "triton"}  # Others pack the experts, where published weights have no place by name.
        options |= {"max_model_len": -1, "gpu_memory_utilization": memory}  # The longest that the memory holds.
        options |= {"compilation_config": {"cudagraph_capture_sizes": captured(max_batch)}}
        options["compilation_config"] |= {"cudagraph_specialize_lora": False}  # A job's adapter is always there.
    set_num_threads = torch.set_num_threads
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model.path,
            dtype=model.dtype,
            load_format="dummy" if model.load_format == "dummy" else "safetensors",
            max_num_seqs=max_batch,
            logprobs_mode=MODE,
            disable_log_stats=True,
            async_scheduling=False,  # A step that is ahead would hold blocks when the prefix cache is dropped.
            enable_return_routed_experts=records_experts,
            **options,
        )
    )
    torch.set_num_threads = set_num_threads  # vLLM's worker for CPUs turns it off for the whole process.
    worker_of(engine).model_runner.sampler = TemperedSampler(sorted(undrawn), device)
    return engine


def captured(max_batch: int) -> list[int]:
    """Batch sizes to capture CUDA graphs for: powers of two and `max_batch`. Each graph makes the start longer;
    other sizes are padded to the next."""
    return sorted({1 << power for power in range(max_batch.bit_length())} | {max_batch})


def stop(engine: Any) -> None:
    """Ends an engine and frees its memory, so that another can start."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    engine.engine_core.shutdown()
    del engine
    cleanup_dist_env_and_memory()


def worker_of(engine: Any) -> Any:
    """The one worker of an engine."""
    return engine.model_executor.driver_worker


def held_rank(rank: int) -> int:
    """The least rank that vLLM has layers for. Raises ValueError for one above all."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    for held in sorted(get_args(MaxLoRARanks)):
        if held >= rank:
            return int(held)
    raise ValueError(f"trainer.lora.rank = {rank}: vLLM has no layers above {held}: lower it, or use another engine")


def _spare_torchvision() -> None:
    """Lets vLLM's Thinker be imported without torchvision, of which it needs one function that needs none itself."""
    name = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
    if importlib.util.find_spec("torchvision") is not None or name in sys.modules:
        return
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    module: Any = ModuleType(name)
    module.smart_resize = smart_resize
    sys.modules[name] = module


def _length(path: str) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    return min(_CPU_LENGTH, int(config.max_position_embeddings))
