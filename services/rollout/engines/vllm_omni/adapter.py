"""A LoRA adapter in vLLM-Omni's layers, set from memory under the names that adapters are published by.

vLLM-Omni multiplies B by alpha / rank when it sets an adapter. So the adapter is kept here as it was published, too:
what the layers hold is compared with that, scaled alike, and then hashed under its published name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import replace_submodule
from vllm.model_executor.layers.linear import LinearBase

from flowfleet.proto.rollout_pb2 import LoraSpec
from services.rollout.engines.vllm_omni.pipelines.base import ADAPTER, RolloutPipeline


class LiveAdapter:
    """Installed into the layers when made, B being zero. `base` are the live parameters by their published names.

    Raises ValueError for a target that the model does not have, and a rank that vLLM has no layers for.
    """

    def __init__(self, pipeline: RolloutPipeline, manager: Any, spec: LoraSpec, base: Mapping[str, Tensor]) -> None:
        self._pipeline = pipeline
        self._manager = manager
        self._spec = spec
        self.published: dict[str, Tensor] = dict(_empty(spec, base))
        """Tensors by published name, on the model's device and in its dtype. Copy into them, then call `bind`."""
        self._require_layers()
        try:
            self.bind()
        except BaseException:
            self.remove()
            raise

    def bind(self) -> None:
        """Puts `published` into the layers."""
        targets = [self._vllm_name(f".{target}.").strip(".") for target in self._spec.target_modules]
        helper = PEFTHelper.from_dict({"r": self._spec.rank, "lora_alpha": self._spec.alpha, "target_modules": targets})
        self._manager.remove_adapter(ADAPTER.lora_int_id)
        tensors = {self._vllm_name(name): value.clone() for name, value in self.published.items()}
        device = str(self._pipeline.device)
        model = LoRAModel.from_lora_tensors(ADAPTER.lora_int_id, tensors, helper, device=device)
        self._pipeline.staged = model, helper
        try:
            self._manager.set_active_adapter(ADAPTER, 1.0)
        finally:
            self._pipeline.staged = None

    def live(self) -> dict[str, Tensor]:
        """Returns the values that the layers hold, by published name, without the scale."""
        return {name: self._live(name, value) for name, value in self.published.items()}

    def remove(self) -> None:
        """Takes the layers out again."""
        self._manager.remove_adapter(ADAPTER.lora_int_id)
        for name, layer in self._manager._lora_modules.items():
            component, _, path = name.partition(".")
            replace_submodule(getattr(self._pipeline, component), path, layer.base_layer)

    def _require_layers(self) -> None:
        packed = self._manager._packed_modules_mapping
        for name in self.published:
            module = self._vllm_name(name).rpartition(".lora_")[0]
            parent, _, part = module.rpartition(".")
            paths = [module, *(f"{parent}.{fused}" for fused, parts in packed.items() if part in parts)]
            if not any(isinstance(self._module(path), LinearBase) for path in paths):
                raise ValueError(
                    f"trainer.lora.target_modules: the vllm-omni engine cannot adapt {name.rpartition('.lora_')[0]}, "
                    "which is none of vLLM's linears: leave it out, or start rollouts with --engine diffusers"
                )

    def _module(self, path: str) -> Any:
        """None where there is no such module."""
        try:
            return self._pipeline.get_submodule(path)
        except AttributeError:
            return None

    def _live(self, name: str, published: Tensor) -> Tensor:
        layer, part = self._slot(name)
        rows, columns = published.shape
        if ".lora_A." in name:
            return layer.lora_a_stacked[part][0, 0, :rows, :columns]  # type: ignore[no-any-return]
        scaled = layer.lora_b_stacked[part][0, 0, :rows, :columns]
        scale = self._spec.alpha / self._spec.rank
        return published if torch.equal(scaled, published * scale) else scaled / scale

    def _slot(self, name: str) -> tuple[Any, int]:
        """The layer that holds a tensor, and its place in there: of a fused layer, which part."""
        module = self._vllm_name(name).rpartition(".lora_")[0]
        if module in self._manager._lora_modules:
            return self._manager._lora_modules[module], 0
        parent, _, part = module.rpartition(".")
        for fused, parts in self._manager._packed_modules_mapping.items():
            if part in parts:
                return self._manager._lora_modules[f"{parent}.{fused}"], parts.index(part)
        raise AssertionError(f"{name} was set, so a layer holds it")

    def _vllm_name(self, name: str) -> str:
        """`transformer.….to_out.0.lora_A.weight` → `transformer.….to_out.lora_A.weight`."""
        for ours, theirs in self._pipeline.renames.items():
            name = name.replace(theirs, ours)
        return name


def _empty(spec: LoraSpec, base: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A and B of zeros for each linear that a target names, as PEFT matches them."""
    linears = {name.removesuffix(".weight"): value for name, value in base.items() if value.ndim == 2}
    for target in spec.target_modules:
        if not any(name.endswith(f".{target}") for name in linears):
            raise ValueError(f"trainer.lora.target_modules: the model has no module {target!r}")
    for name, weight in linears.items():
        if any(name.endswith(f".{target}") for target in spec.target_modules):
            rows, columns = weight.shape
            yield f"{name}.lora_A.weight", weight.new_zeros(spec.rank, columns)
            yield f"{name}.lora_B.weight", weight.new_zeros(rows, spec.rank)
