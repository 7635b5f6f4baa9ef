"""`rows.formula` as one Triton kernel, a program a row. Import it only where Triton is: with torch on CUDA."""

# Triton is not installed where types are checked, and its kernels are written without.
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowfleet.quantization.rows import FP8, FP8_MAX, SMALLEST_MAX, Rows

_MAX = tl.constexpr(FP8_MAX)
_INVERSE = tl.constexpr(1 / FP8_MAX)
_SMALLEST_MAX = tl.constexpr(SMALLEST_MAX)
_PER_THREAD = 16
"""Elements of a row that a thread holds in registers."""


def quantize_rows(x: Tensor, factors: Tensor | None) -> Rows:
    """Quantizes all rows in one launch; a row is read once and stays in registers."""
    x = x.contiguous()
    num_rows, width = x.shape
    rows = torch.empty(num_rows, width, dtype=FP8, device=x.device)
    scale = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    block, num_warps = shape_of_rows(width)
    launchable(_quantize_row)[(num_rows,)](
        x, x if factors is None else factors, rows, scale, width, factors is not None, block, num_warps=num_warps
    )
    return rows, scale


def shape_of_rows(width: int) -> tuple[int, int]:
    """Columns of a program that holds a row, and its warps."""
    block = triton.next_power_of_2(width)
    return block, min(8, max(1, block // (32 * _PER_THREAD)))


def launchable(kernel: Any) -> Any:
    """A kernel that torch.compile sees when it is launched; in Triton's interpreter the function itself."""
    return kernel if triton.knobs.runtime.interpret else torch.library.wrap_triton(kernel)


@triton.jit
def _quantize_row(source, factors, target, scales, width, HAS_FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(source + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        value = value * tl.load(factors + column, mask=inside, other=0.0)
    quantized(value, target + row * width + column, scales + row, inside)


@triton.jit
def quantized(value, target, scale, inside):
    """Stores a row (0 outside) in float8, and its scale. Rounding to float8 saturates: nothing becomes more than the
    largest."""
    largest = tl.maximum(tl.max(tl.abs(value)), _SMALLEST_MAX)
    tl.store(target, (value * tl.div_rn(_MAX, largest)).to(tl.float8e4nv), mask=inside)
    tl.store(scale, largest * _INVERSE)
