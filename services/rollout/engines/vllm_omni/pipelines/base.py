"""The base of our vLLM-Omni pipelines: its transformers, driven by the sampler and model adapter of this repository.

vLLM-Omni schedules a batch of the sampler as one request and calls `forward` with it. Prompts, schedule, steps and
decoding are then the very functions that the diffusers engine and the trainer call; what differs is the transformer:
fused projections, vLLM's linears and LoRA layers, vLLM-Omni's attention.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.cancellation import check_request_cancellation
from vllm_omni.diffusion.data import DiffusionOutput, DiffusionRequestAbortedError
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.lora.layers import DiffusionBaseLinearLayerWithLoRA

from flowfleet.models.base import ModelAdapter
from services.rollout.engines.sampler import Sampler
from services.rollout.engines.vllm_omni.task import Task

TASK = "task"
"""The key of a request's task in its `extra_args`."""


ADAPTER = LoRARequest("policy", 1, "/memory")
"""Adapter named by requests that are drawn with it; only one is loaded at a time."""


class RolloutPipeline(nn.Module):
    """A family gives `components`, `renames` and `make_transformer`. Weights come later, by the worker extension."""

    supports_request_batch = True
    supports_request_cancellation = True
    _dit_modules: ClassVar[list[str]]
    """Components that are transformers."""
    renames: ClassVar[Mapping[str, str]] = {}
    """Parts of module names in vLLM-Omni, each with the one that diffusers has in its place."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Modules that are known by a second name, which is the key."""

    adapter: ModelAdapter
    sampler: Sampler

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.od_config = od_config
        self.device: torch.device = get_local_device()
        self.staged: tuple[Any, Any] | None = None
        """The LoRA model and configuration that the hook below hands out."""
        for component in self._dit_modules:
            setattr(self, component, self.make_transformer(component))

    @abstractmethod
    def make_transformer(self, component: str) -> nn.Module | None:
        """A transformer of vLLM-Omni on `device`, its parameters empty, that can be called as diffusers' can; None
        where the checkpoint has no such component."""

    @property
    def experts(self) -> dict[str, nn.Module]:
        """Transformers by component."""
        made = {component: getattr(self, component) for component in self._dit_modules}
        return {component: transformer for component, transformer in made.items() if transformer is not None}

    def attach(self, adapter: ModelAdapter) -> None:
        """Takes an adapter with text encoder and VAE, and gives it the transformers."""
        for component, transformer in self.experts.items():
            setattr(adapter.pipeline, component, transformer)
        self.adapter, self.sampler = adapter, Sampler(adapter, self.without_lora)

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """Inside, the transformers compute as before training: the adapter stays where it is and is not read."""
        layers = [layer for layer in self.modules() if isinstance(layer, DiffusionBaseLinearLayerWithLoRA)]
        for layer in layers:
            layer.suspend_lora()
        try:
            yield
        finally:
            for layer in layers:
                layer.resume_lora()

    def forward(self, batch: Any) -> list[DiffusionOutput]:
        """Runs the task of each request; vLLM-Omni's own run at start-up has none."""
        for parameters in batch.sampling_params_list:
            task: Task[Any] | None = parameters.extra_args.get(TASK)
            if task is not None:
                with torch.inference_mode(False):  # Its tensors could not go into autograd later.
                    task.run(self, passing=(DiffusionRequestAbortedError,))
        return [DiffusionOutput() for _ in batch.requests]

    @staticmethod
    def check_cancelled() -> None:
        """Raises vLLM-Omni's exception if the request that runs was aborted."""
        check_request_cancellation()

    def load_weights(self, stored: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Reads none: the worker extension fills the parameters. Lets the transformers say which linears are fused,
        which LoRA asks for."""
        transformers: Mapping[str, Any] = self.experts
        for transformer in transformers.values():
            transformer.load_weights(iter(()))
        return {name for name, _ in self.named_parameters()}

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str, dtype: torch.dtype) -> Any:
        """vLLM-Omni's hook for adapters that are no files."""
        return self.staged

    def _get_diffusion_lora_name_aliases(self, full_module_name: str) -> list[str]:
        """vLLM-Omni's hook for modules with two names."""
        return [self.aliases[full_module_name]] if full_module_name in self.aliases else []
