"""LoRA on vLLM's linears for torch.compile, and merged into their weights.

vLLM-Omni adds each part's product into its slice of the output in place, `torch.addmm(out=slice)`, as suits eager mode.
A compiled block breaks into pieces there if a linear is fused, because a slice's memory is not contiguous; otherwise it
copies the whole output first. While compiling, one product takes all A matrices of a fused linear, and one operator
adds those of B where the large product was written (flowfleet/quantization/adapted.py).
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm_omni.diffusion.lora.layers import DiffusionBaseLinearLayerWithLoRA

from flowfleet.quantization import adapted


def prepare_layers(layers: Iterable[nn.Module], *, merged: bool) -> None:
    """Gives vLLM-Omni's LoRA layers, by another class, an `apply` that compiles whole and copies nothing, or one that
    multiplies by merged weights, which `merge` makes."""
    kind = MergedLoRA if merged else CompilableLoRA
    for layer in layers:
        if isinstance(layer, DiffusionBaseLinearLayerWithLoRA) and not isinstance(layer, kind):
            if merged:
                adapted.keep_merged(layer, layer.base_layer)
            name = f"{kind.__name__}{type(layer).__name__}"
            layer.__class__ = _classes.setdefault(name, type(name, (kind, type(layer)), {}))


def merge(layers: Iterable[nn.Module]) -> None:
    """Rounds the adapters as they are into the copies of the weights; no effect on other layers."""
    for layer in layers:
        if isinstance(layer, MergedLoRA):
            adapted_layer: Any = layer
            adapted.fill_merged(layer, adapted_layer.base_layer, ((start, a, b) for a, b, start in _parts(layer)), 1.0)


class CompilableLoRA:
    """Stands before a layer of vLLM-Omni's in the order of classes."""

    def apply(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + b, and for each part with an adapter x Aᵀ Bᵀ besides; (..., N) of the dtype of `x` (..., K)."""
        if not torch.compiler.is_compiling():
            eager: Tensor = super().apply(x, bias)  # type: ignore[misc]
            return eager
        layer = self.base_layer
        output: Tensor = layer.quant_method.apply(layer, x, bias)
        parts = list(_parts(self))
        if parts:
            downs, ups, starts = zip(*parts, strict=True)
            down = F.linear(x, torch.cat(downs) if len(downs) > 1 else downs[0])
            adapted.add_adapters(output, down, list(ups), list(starts), 1.0)
        return output


class MergedLoRA:
    """Stands there too. Suspended, it is the layer without adapter."""

    def apply(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + b with the merged weight."""
        if any(self._diffusion_lora_active_slices):
            return adapted.product(self, x, bias)
        layer = self.base_layer
        plain: Tensor = layer.quant_method.apply(layer, x, bias)
        return plain


def _parts(layer: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """A, B, which includes the scale, and the first output column of each part that has an adapter."""
    starts = accumulate((up.shape[2] for up in layer.lora_b_stacked), initial=0)
    slices = zip(layer.lora_a_stacked, layer.lora_b_stacked, starts, layer._diffusion_lora_active_slices, strict=False)
    yield from ((down[0, 0], up[0, 0], start) for down, up, start, is_active in slices if is_active)


_classes: dict[str, Any] = {}
"""Made so far, by name."""
