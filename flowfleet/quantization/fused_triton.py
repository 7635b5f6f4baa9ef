"""The formulas of `fused` as Triton kernels, a program a row, which stays in registers from its one read to its writes.
Values are computed in float32 and rounded once; their float8 rows are of what was rounded. Import it only where Triton
is: with torch on CUDA, or in Triton's interpreter."""

# Triton is not installed where types are checked, and its kernels are written without.
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowfleet.quantization.rows import FP8
from flowfleet.quantization.rows_triton import launchable, quantized, shape_of_rows


def gelu_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused.gelu_formula`."""
    x = x.contiguous()
    values, rows, scales = _outputs(x)
    block, num_warps = shape_of_rows(x.shape[1])
    launchable(_gelu_row)[(len(x),)](x, values, rows, scales, x.shape[1], block, num_warps=num_warps)
    return values, rows, scales


def norm_rows(
    x: Tensor, gate: Tensor | None, change: Tensor | None, shift: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `fused.norm_formula`. Shift, scale and gate may be slices of one tensor's columns."""
    x, (_, tokens, width) = x.contiguous(), x.shape
    has_change = gate is not None and change is not None
    gate, change = (gate, change.contiguous()) if gate is not None and change is not None else (scale, x)
    shift, scale, gate = (part if part.stride(1) == 1 else part.contiguous() for part in (shift, scale, gate))
    total = torch.empty_like(x) if has_change else x.new_empty(0)
    values, rows, scales = _outputs(x.view(-1, width))
    block, num_warps = shape_of_rows(width)
    launchable(_norm_row)[(len(rows),)](
        *(x, gate, change, shift, scale, total if has_change else x, values, rows, scales),
        *(gate.stride(0), shift.stride(0), scale.stride(0), tokens, width, eps, has_change, block),
        num_warps=num_warps,
    )
    return total, values.view(x.shape), rows, scales


def _outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.empty(x.shape, dtype=FP8, device=x.device)
    return torch.empty_like(x), rows, torch.empty(len(x), 1, dtype=torch.float32, device=x.device)


@triton.jit
def _gelu_row(source, values, rows, scales, width, BLOCK: tl.constexpr):
    """x · s(u) is the tanh formula, s being the logistic function and u = 2 √(2/π) (x + 0.044715 x³)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    offset = row * width + column
    x = tl.load(source + offset, mask=inside, other=0.0).to(tl.float32)
    u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    rounded = (x / (1.0 + tl.exp(-u))).to(values.dtype.element_ty)
    tl.store(values + offset, rounded, mask=inside)
    quantized(rounded.to(tl.float32), rows + offset, scales + row, inside)


@triton.jit
def _norm_row(
    source,
    gates,
    changes,
    shifts,
    factors,
    totals,
    values,
    rows,
    scales,
    gate_stride,
    shift_stride,
    factor_stride,
    tokens,
    width,
    eps,
    HAS_CHANGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sample = row // tokens
    column = tl.arange(0, BLOCK)
    inside = column < width
    offset = row * width + column
    x = tl.load(source + offset, mask=inside, other=0.0).to(tl.float32)
    if HAS_CHANGE:
        gate = tl.load(gates + sample * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = x + gate * tl.load(changes + offset, mask=inside, other=0.0).to(tl.float32)
        stored = total.to(totals.dtype.element_ty)
        tl.store(totals + offset, stored, mask=inside)
        x = stored.to(tl.float32)
    centered = tl.where(inside, x - tl.sum(x) / width, 0.0)
    normed = centered * (1.0 / tl.sqrt(tl.sum(centered * centered) / width + eps))
    factor = tl.load(factors + sample * factor_stride + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shifts + sample * shift_stride + column, mask=inside, other=0.0).to(tl.float32)
    rounded = (normed * (1.0 + factor) + shift).to(values.dtype.element_ty)
    tl.store(values + offset, rounded, mask=inside)
    quantized(tl.where(inside, rounded.to(tl.float32), 0.0), rows + offset, scales + row, inside)
