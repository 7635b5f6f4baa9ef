"""LoRA on fused linears for torch.compile.

vLLM-Omni adds each part's product into its slice of the output in place, `torch.addmm(out=slice)`. That is what eager
mode wants; but a compiled block breaks into pieces at it, for a slice's memory is not contiguous. While compiling, the
same sums are written without `out`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.lora.layers import DiffusionMergedQKVParallelLinearWithLoRA


class CompilableLoRA(DiffusionMergedQKVParallelLinearWithLoRA):
    """Made of a layer of vLLM-Omni's by `make_compilable`, which swaps the class."""

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + b, and for each part with an adapter x Aᵀ Bᵀ besides; (..., N) of the dtype of `x` (..., K)."""
        if not torch.compiler.is_compiling():
            eager: Tensor = super().apply(x, bias)
            return eager
        layer: Any = self.base_layer
        output: Tensor = layer.quant_method.apply(layer, x, bias)
        if not any(self._diffusion_lora_active_slices):
            return output
        rows, parts = x.reshape(-1, x.shape[-1]), []
        for place, part in enumerate(torch.split(output.reshape(len(rows), -1), list(self.output_slices), dim=1)):
            if self._diffusion_lora_active_slices[place]:
                down, up = self.lora_a_stacked[place][0, 0], self.lora_b_stacked[place][0, 0]
                part = torch.addmm(part, rows @ down.t(), up.t())
            parts.append(part)
        return torch.cat(parts, dim=1).reshape(output.shape)


def make_compilable(layers: Iterable[nn.Module]) -> None:
    """Lets the fused ones among vLLM-Omni's LoRA layers be compiled whole."""
    for layer in layers:
        if type(layer) is DiffusionMergedQKVParallelLinearWithLoRA:
            layer.__class__ = CompilableLoRA
