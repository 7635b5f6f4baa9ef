"""Experts of a mixture in float8: matrices in one tensor, rounded as linears are, a scale for each expert and channel.

On GPUs of compute capability 9.0 and newer one grouped product multiplies all rows; elsewhere it is a loop over the
experts by the product of `products`.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowfleet.hardware import devices
from flowfleet.quantization.products import multiply
from flowfleet.quantization.rows import quantize_rows


class ExpertWeights(nn.Module):
    """A module whose own parameters are the matrices of its experts, (E, N, K) each."""

    def grouped(self, name: str, rows: Tensor, ends: Tensor) -> Tensor:
        """(M, N): each row times its expert's matrix of the parameter `name`.

        Args:
            name: of a parameter.
            rows: (M, K), sorted by expert.
            ends: (E,) int32, how many rows belong to each expert and those before it.
        """
        weight, scale = cast(Tensor, getattr(self, name)), self._buffers.get(f"{name}_scale")
        if scale is None:
            return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        product: Tensor = _Product.apply(rows, weight, scale, ends)  # type: ignore[no-untyped-call]
        return product


def expert_weights(blocks: Iterable[nn.Module], least: int, multiple: int) -> Iterator[tuple[ExpertWeights, str]]:
    """The blocks' matrices of experts whose sides are at least `least` and multiples of `multiple`, by module and
    parameter."""
    for module in (module for block in blocks for module in block.modules()):
        if isinstance(module, ExpertWeights):
            for name, parameter in list(module.named_parameters(recurse=False)):
                sides = parameter.shape[1:]
                if min(sides) >= least and all(side % multiple == 0 for side in sides):
                    yield module, name


@torch.no_grad()
def replace(module: ExpertWeights, name: str) -> None:
    """Rounds a parameter to float8, an expert at a time; no effect on one that is rounded."""
    weight = cast(Tensor, getattr(module, name))
    if f"{name}_scale" in module._buffers:
        return
    rounded = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
    for number, expert in enumerate(weight):
        rows, scale = quantize_rows(expert)
        rounded[number] = rows
        scales[number] = scale[:, 0]
    setattr(module, name, nn.Parameter(rounded, requires_grad=False))
    module.register_buffer(f"{name}_scale", scales, persistent=False)


def adopt(module: ExpertWeights, base: ExpertWeights) -> None:
    """Gives a module what another one holds in float8, on the same memory."""
    for name, parameter in base.named_parameters(recurse=False):
        scale = base._buffers.get(f"{name}_scale")
        if scale is not None:
            setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=False))
            module.register_buffer(f"{name}_scale", scale, persistent=False)


class _Product(torch.autograd.Function):
    """Gradients go to the rows: the weights are frozen."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale, ends)
        return _multiply(rows, weight, scale, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The sum is over output channels, so the gradient takes their scales in before it is rounded itself."""
        weight, scale, ends = ctx.saved_tensors
        (grad,) = grads
        numbers = torch.searchsorted(ends, torch.arange(len(grad), device=grad.device, dtype=ends.dtype), right=True)
        scaled = (grad.float() * scale[numbers]).to(grad.dtype)
        ones = torch.ones(weight.shape[0], weight.shape[2], device=grad.device)
        return _multiply(scaled, weight.transpose(1, 2).contiguous(), ones, ends), None, None, None


def _multiply(rows: Tensor, weight: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    quantized, row_scale = quantize_rows(rows.detach())
    if devices.has_grouped_fp8(rows.device):
        return grouped_product(quantized, row_scale, weight, scale, ends, rows.dtype)
    parts, start = [], 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            inputs = quantized[start:end], row_scale[start:end]
            parts.append(multiply(*inputs, weight[number], scale[number : number + 1], rows.dtype))
        start = end
    return torch.cat(parts)


def grouped_product(
    rows: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """torch's one kernel for all experts: rows (M, K) and weight (E, N, K) in float8, scales (M, 1) and (E, N)."""
    product: Tensor = torch._scaled_grouped_mm(
        rows, weight.transpose(1, 2), row_scale[:, 0], scale, offs=ends, out_dtype=dtype, use_fast_accum=True
    )
    return product
