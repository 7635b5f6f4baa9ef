"""LoRA on vLLM's linears for torch.compile.

vLLM-Omni adds each part's product into its slice of the output in place, `torch.addmm(out=slice)`. That is what eager
mode wants. A compiled block breaks into pieces at it where a linear is fused, for a slice's memory is not contiguous,
and elsewhere copies the whole output first. While compiling, the sums are written as PEFT writes them: product and sum
apart, so that the sum becomes part of whatever kernel comes next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.lora.layers import DiffusionBaseLinearLayerWithLoRA


def make_compilable(layers: Iterable[nn.Module]) -> None:
    """Gives vLLM-Omni's LoRA layers, by another class, an `apply` that compiles whole and copies nothing."""
    for layer in layers:
        if isinstance(layer, DiffusionBaseLinearLayerWithLoRA) and not isinstance(layer, CompilableLoRA):
            name = type(layer).__name__
            layer.__class__ = _classes.setdefault(name, type(name, (CompilableLoRA, type(layer)), {}))


class CompilableLoRA:
    """Stands before a layer of vLLM-Omni's in the order of classes."""

    def apply(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + b, and for each part with an adapter x Aᵀ Bᵀ besides; (..., N) of the dtype of `x` (..., K)."""
        if not torch.compiler.is_compiling():
            eager: Tensor = super().apply(x, bias)  # type: ignore[misc]
            return eager
        layer = self.base_layer
        output: Tensor = layer.quant_method.apply(layer, x, bias)
        if not any(self._diffusion_lora_active_slices):
            return output
        parts = []
        for place, part in enumerate(torch.split(output, [up.shape[2] for up in self.lora_b_stacked], dim=-1)):
            if self._diffusion_lora_active_slices[place]:
                down, up = self.lora_a_stacked[place][0, 0], self.lora_b_stacked[place][0, 0]
                part = part + x @ down.t() @ up.t()
            parts.append(part)
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


_classes: dict[str, Any] = {}
"""Made so far, by the name of vLLM-Omni's."""
