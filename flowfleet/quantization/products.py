"""x Wᵀ + b in float8, with gradients to x. W = weight * scaleᵀ, a scale an output channel: frozen (`fp8_linear`), or
rounded from a bfloat16 weight that is trained (`fp8_trained_linear`).

The backward's product, g W, sums over output channels, so that their scales do not factor out of it: the gradient takes
them in before it is rounded itself. The kernels want the summed dimension of both matrices contiguous, so the weight's
transposed copy is made for that product alone, a layer at a time.
"""

from typing import Any, Final

import torch
from torch import Tensor

from flowfleet.quantization.rows import Rows, quantize_rows

FEWEST_ROWS: Final = 64
"""Fewer are padded to so many: cuBLAS refuses up to 40 where 12,288 numbers are summed and a bias is added."""


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    rows: Rows | None = None,
    ones: Tensor | None = None,
) -> Tensor:
    """x Wᵀ + b in the dtype of `x`, with x quantized row by row.

    Args:
        x: (..., K) bfloat16.
        weight: (N, K) float8_e4m3fn, contiguous.
        weight_scale: (1, N) float32; weight * weight_scaleᵀ is what was quantized.
        bias: (N,) of the dtype of `x`, or None.
        rows: x quantized already, where several linears share it.
        ones: (1, K) float32, scales of the product for the gradient of `x`; made each time where they are not given.
    """
    flat = x.reshape(-1, x.shape[-1])
    quantized, scale = quantize_rows(flat.detach()) if rows is None else rows
    product: Tensor = _Product.apply(flat, quantized, scale, weight, weight_scale, bias, ones)  # type: ignore[no-untyped-call]
    return product.reshape(*x.shape[:-1], len(weight))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        quantized: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        ones: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(weight, weight_scale, ones)
        return multiply(quantized, scale, weight, weight_scale, x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weight, weight_scale, ones = ctx.saved_tensors
        return _gradient(grads[0], weight, weight_scale, ones), None, None, None, None, None, None


def fp8_trained_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, rows: Rows | None = None) -> Tensor:
    """x Wᵀ + b in the dtype of `x`, with x and the weight quantized row by row, and gradients to all three.

    The gradient of `x` is that by the rounded weight, multiplied in float8. Those of weight and bias are of `x` itself,
    in its dtype: torchao's recipe `rowwise_with_gw_hp`. The backward rounds the weight again and keeps nothing of it.

    Args:
        x: (..., K) bfloat16.
        weight: (N, K) bfloat16.
        bias: (N,) of the dtype of `x`, or None.
        rows: x quantized already, where several linears share it.
    """
    flat = x.reshape(-1, x.shape[-1])
    quantized, scale = quantize_rows(flat.detach()) if rows is None else rows
    product: Tensor = _TrainedProduct.apply(flat, weight, bias, quantized, scale)  # type: ignore[no-untyped-call]
    return product.reshape(*x.shape[:-1], len(weight))


class _TrainedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, quantized: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return multiply(quantized, scale, *_quantize_weight(weight), x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        of_bias = grad.sum(dim=0) if ctx.has_bias else None
        return _gradient(grad, *_quantize_weight(weight)), grad.t() @ x, of_bias, None, None


def _quantize_weight(weight: Tensor) -> Rows:
    """The float8 weight (N, K) and its scales (1, N)."""
    rows, scale = quantize_rows(weight.detach())
    return rows, scale.view(1, -1)


def _gradient(grad: Tensor, weight: Tensor, weight_scale: Tensor, ones: Tensor | None = None) -> Tensor:
    """g W (M, K) in float8."""
    rows, scale = quantize_rows(grad, weight_scale[0])
    if ones is None:
        ones = torch.ones(1, weight.shape[1], device=grad.device)
    return multiply(rows, scale, weight.t().contiguous(), ones, grad.dtype)


def multiply(
    rows: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """(M, N) of rows (M, K) and weight (N, K) in float8 with scales (M, 1) and (1, N)."""
    num_rows = len(rows)
    if num_rows < FEWEST_ROWS:  # of short prompts
        missing = FEWEST_ROWS - num_rows
        bits = rows.view(torch.uint8)  # float8 itself cannot be joined everywhere
        rows = torch.cat([bits, bits.new_zeros(missing, bits.shape[1])]).view(rows.dtype)
        scale = torch.cat([scale, scale.new_ones(missing, 1)])
    product = torch._scaled_mm(
        rows, weight.t(), scale_a=scale, scale_b=weight_scale, bias=bias, out_dtype=dtype, use_fast_accum=True
    )
    return product[:num_rows]
