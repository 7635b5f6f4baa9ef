"""A LoRA adapter in vLLM's layers, set from memory under the names that adapters are published by.

vLLM multiplies B by alpha / rank when it adds an adapter. So the adapter is kept here as it was published, too: what
the layers hold is compared with that, scaled alike, and then hashed under its published name.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from flowfleet.models.sequences.adapter import MODEL
from flowfleet.proto.rollout_pb2 import LoraSpec
from services.rollout.engines.vllm.parameters import vllm_name

REQUEST: Final = LoRARequest("flowfleet", 1, "in-memory")
"""Adapter named by requests that are sampled with it. vLLM loads nothing, because the layers already hold it."""
_A, _B = ".lora_A.weight", ".lora_B.weight"


class LiveAdapter:
    """`manager` is vLLM's `LoRAModelManager`; `shapes` are the adapter's tensors by published name, of any values;
    `renames` as in parameters.py.

    Raises ValueError for a target that vLLM has no LoRA layer for.
    """

    def __init__(
        self,
        manager: Any,
        spec: LoraSpec,
        shapes: Mapping[str, Tensor],
        renames: Mapping[str, str],
        device: torch.device,
    ) -> None:
        self._manager, self._spec, self._renames = manager, spec, renames
        self.published = {
            name: torch.zeros(value.shape, dtype=value.dtype, device=device) for name, value in shapes.items()
        }
        """Tensors by published name. Copy into them, then call `bind`."""
        self._places = {name: self._place(self._module(name)) for name in shapes}
        self.bind()

    def bind(self) -> None:
        """Puts `published` into the layers."""
        spec, number = self._spec, REQUEST.lora_int_id
        layers = {}
        for name in (name for name in self.published if name.endswith(_A)):
            module = self._module(name)
            a, b = self.published[name].clone(), self.published[name.removesuffix(_A) + _B].clone()
            layers[module] = LoRALayerWeights(module, spec.rank, spec.alpha, a, b)
        self._manager.remove_adapter(number)
        self._manager.add_adapter(LoRAModel(number, spec.rank, layers))
        self._manager.activate_adapter(number)

    def live(self) -> dict[str, Tensor]:
        """Returns the values that the layers hold, by published name, without the scale."""
        return {name: self._live(name, value) for name, value in self.published.items()}

    def _live(self, name: str, published: Tensor) -> Tensor:
        layer, part = self._places[name]
        slot = self._manager.lora_index_to_id.index(REQUEST.lora_int_id)
        rows, columns = published.shape
        if name.endswith(_A):
            rows_of_a: Tensor = layer.lora_a_stacked[part][slot, 0, :rows, :columns]
            return rows_of_a
        scaled: Tensor = layer.lora_b_stacked[part][slot, 0, :rows, :columns]
        scale = self._spec.alpha / self._spec.rank
        return published if torch.equal(scaled, published * scale) else scaled / scale

    def _place(self, module: str) -> tuple[Any, int]:
        """The layer that holds an adapted module, and its part in there."""
        for path, parts in ((module, [module]), *self._manager.packed_modules.items()):
            if module in parts and path in self._manager.modules:
                return self._manager.modules[path], parts.index(module)
        raise ValueError(
            f"trainer.lora.target_modules: vLLM has no LoRA layer for {module}: leave it out, or start rollouts with "
            "--engine transformers"
        )

    def _module(self, name: str) -> str:
        """The adapted module of a published tensor, as vLLM names it."""
        return vllm_name(name.removeprefix(f"{MODEL}.").removesuffix(_A).removesuffix(_B), self._renames)
