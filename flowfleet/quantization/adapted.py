"""Linears with a LoRA adapter as rollouts and compiled trainers multiply them: by products of their own, or merged.

PEFT's own layers are the reference: A's product, B's, then their sum, each rounded by itself. Compiled, one input is
multiplied by the A matrices of several linears at once (`shared_down`), which is all that a trainer changes. Rollouts
also add B's product where the large one was written (`add_adapters`): a sum in the graph would be a pass of its own
before whatever quantizes the output, and torch.compile copies the output before an addmm into it.

A merged adapter is part of the weight, a copy that is rounded again for each version. It costs no product, but an early
adapter changes most weights by less than a step of bfloat16, let alone float8, so that rounding replaces it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch.nn import functional as F

from flowfleet.quantization.products import fp8_linear
from flowfleet.quantization.rows import FP8, Rows, quantize_rows


@torch.library.custom_op("flowfleet::add_adapters", mutates_args=("output",))
def add_adapters(output: Tensor, down: Tensor, ups: list[Tensor], starts: list[int], scale: float) -> None:
    """Adds scale · downᵢ upᵢᵀ to the columns from startᵢ on, in place. No gradient.

    Args:
        output: (..., N), contiguous.
        down: (..., R), the products with all A matrices side by side.
        ups: B matrices (Nᵢ, Rᵢ); the Rᵢ add up to R.
        starts: first column of each.
        scale: alpha / rank.
    """
    rows, parts = output.view(-1, output.shape[-1]), down.reshape(-1, down.shape[-1])
    for start, up, part in zip(starts, ups, torch.split(parts, [up.shape[1] for up in ups], dim=1), strict=True):
        rows[:, start : start + len(up)].addmm_(part, up.t(), alpha=scale)


class SharingLinear(PeftLinear):
    """PEFT's layer, for which A's product may come from outside. Made of one by swapping the class."""

    def forward(self, x: Tensor, rows: Rows | None = None, down: Tensor | None = None) -> Tensor:
        """`down`: x Aᵀ, where several linears share that product."""
        shared = {} if rows is None else {"rows": rows}
        if down is None:
            return super().forward(x, **shared)
        _, up, scale = factors(self)
        output: Tensor = self.base_layer(x, **shared) + F.linear(down, up) * scale
        return output


class AdaptedLinear(PeftLinear):
    """PEFT's layer without its roundings between the products, and without gradient. Made of one by swapping the
    class."""

    def forward(self, x: Tensor, rows: Rows | None = None, down: Tensor | None = None) -> Tensor:
        """`down`: as `SharingLinear`."""
        shared = {} if rows is None else {"rows": rows}
        if torch.is_grad_enabled():
            return super().forward(x, **shared)
        output: Tensor = self.base_layer(x, **shared)
        if not self.disable_adapters:
            down_weight, up_weight, scale = factors(self)
            down = F.linear(x, down_weight) if down is None else down
            add_adapters(output, down, [up_weight], [0], scale)
        return output


class MergedLinear(PeftLinear):
    """PEFT's layer with the adapter rounded into a copy of the weight, which `merge` makes."""

    merged_weight: Tensor
    merged_scale: Tensor

    def forward(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        if self.disable_adapters:
            shared = {} if rows is None else {"rows": rows}
            return cast(Tensor, self.base_layer(x, **shared))
        return product(self, x, cast(Any, self.base_layer).bias, rows)


def shared_down(x: Tensor, linears: Sequence[nn.Module]) -> list[Tensor] | None:
    """x Aᵀ for each linear, by one product; None unless each of them would compute its own."""
    kinds = (SharingLinear,) if torch.is_grad_enabled() else (SharingLinear, AdaptedLinear)
    adapted = [linear for linear in linears if isinstance(linear, kinds) and not linear.disable_adapters]
    if any(getattr(linear, "is_mixed", False) for linear in adapted):  # each row has its own A
        return None
    if len(adapted) < max(2, len(linears)):
        return None
    downs = [factors(linear)[0] for linear in adapted]
    return list(torch.split(F.linear(x, torch.cat(downs)), [len(down) for down in downs], dim=-1))


def put(kind: type[PeftLinear], modules: Iterable[nn.Module]) -> None:
    """Makes PEFT's linears among the modules compute as a class of this module; `MergedLinear` with a copy of each
    weight."""
    for module in modules:
        if type(module) is PeftLinear:
            if kind is MergedLinear:
                keep_merged(module, module.base_layer)
            module.__class__ = kind


def merge(modules: Iterable[nn.Module]) -> None:
    """Rounds the adapters as they are into the copies; no effect on other modules."""
    for module in modules:
        if isinstance(module, MergedLinear):
            down, up, scale = factors(module)
            fill_merged(module, module.base_layer, [(0, down, up)], scale)


def factors(layer: Any) -> tuple[Tensor, Tensor, float]:
    """A, B and alpha / rank of a PEFT layer with one adapter."""
    name = layer.active_adapters[0]
    return layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


def keep_merged(holder: nn.Module, base: Any) -> None:
    """Gives a module buffers for the merged weight of a linear: bfloat16, or float8 with a scale a row, as the linear
    multiplies."""
    weight = rounded_weight(base)
    holder.register_buffer("merged_weight", torch.empty_like(weight), persistent=False)
    if weight.dtype == FP8:
        holder.register_buffer("merged_scale", torch.empty_like(base.fp8_scale), persistent=False)


@torch.no_grad()
def fill_merged(holder: Any, base: Any, parts: Iterable[tuple[int, Tensor, Tensor]], scale: float) -> None:
    """Rounds a linear's weight and its adapter, (first row, A, B) for each part, into the holder's buffers."""
    weight = rounded_weight(base)
    exact = weight.to(torch.float32, copy=True)
    if weight.dtype == FP8:
        exact *= base.fp8_scale.t()
    for start, down, up in parts:
        exact[start : start + len(up)].addmm_(up.float(), down.float(), alpha=scale)
    if weight.dtype == FP8:
        rows, scales = quantize_rows(exact)
        holder.merged_weight.copy_(rows)
        holder.merged_scale.copy_(scales.t())
    else:
        holder.merged_weight.copy_(exact)


def product(holder: Any, x: Tensor, bias: Tensor | None, rows: Rows | None = None) -> Tensor:
    """x Wᵀ + b with the holder's merged weight."""
    if holder.merged_weight.dtype == FP8:
        return fp8_linear(x, holder.merged_weight, holder.merged_scale, bias, rows=rows)
    return F.linear(x, holder.merged_weight, bias)


def rounded_weight(base: Any) -> Tensor:
    """Returns a linear's weight as it is multiplied by: its float8 weight or copy, which has `fp8_scale`, if any."""
    weight: Tensor = getattr(base, "fp8_weight", base.weight)
    return weight
