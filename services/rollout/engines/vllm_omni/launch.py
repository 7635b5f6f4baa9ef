"""Starts vLLM-Omni in this process, with our pipelines and worker extension. vLLM-Omni is not imported before."""

import asyncio
import importlib.util
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch

from flowfleet.extras import pip_install
from flowfleet.proto.rollout_pb2 import ModelSpec
from services.rollout.engines.vllm import cpu_kernels
from services.rollout.engines.vllm_omni import slim_imports
from services.rollout.engines.vllm_omni.plugin import set_environment

ATTENTION_BACKEND = "TORCH_SDPA"
"""vLLM-Omni's default needs the flash-attn package."""
_EXTENSION = "services.rollout.engines.vllm_omni.extension.RolloutWorkerExtension"


def require_installed() -> None:
    """Raises ValueError where vLLM or vLLM-Omni is not."""
    missing = [name for name in ("vllm", "vllm_omni") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"--engine vllm-omni: {' and '.join(missing)} not installed: {pip_install('vllm-omni')} on NVIDIA "
            "GPUs, `make vllm-omni` on CPUs; or give --engine diffusers"
        )


def start(model: ModelSpec, pipeline: str, device: torch.device, attention_backend: str) -> Any:
    """An `AsyncOmni` with one worker on `device`, whose transformers have no weights yet. Takes seconds.

    Args:
        model: what to start for; of its folder only configurations are read.
        pipeline: the name of our pipeline class.
        device: the CPU, or the first accelerator that this process sees.
        attention_backend: of vLLM-Omni's, on accelerators.
    """
    set_environment(device.type)
    slim_imports.install()
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    if device.type == "cpu":
        cpu_kernels.keep_weights()
    _quieten()
    attention = {} if device.type == "cpu" else {"diffusion_attention_backend": attention_backend}
    return AsyncOmni(
        model=model.path,
        dtype=model.dtype,
        max_num_seqs=1,  # A request is a batch already.
        log_stats=False,
        enforce_eager=True,  # Blocks are compiled by `acceleration`.
        custom_pipeline_args={"pipeline_class": pipeline},
        worker_extension_cls=_EXTENSION,
        **attention,
    )


def _quieten() -> None:
    """Silences vLLM-Omni's line per request, and its warning per request without output of its own: ours have none."""
    for library in ("vllm", "vllm_omni"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("vllm_omni.diffusion.diffusion_engine").setLevel(logging.ERROR)


T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a thread until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Runs it there; the future is of the caller's loop. Cancelling the future cancels the coroutine."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Calls it there, blocking that loop."""

        async def run() -> T:
            return function()

        return self.submit(run())

    def close(self) -> None:
        """Ends the loop and waits for the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
