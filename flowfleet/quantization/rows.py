"""Rounding to e4m3 with a scale for each row: an activation's token, a weight's output channel.

`quantize_rows` reads memory once on CUDA (rows_triton.py), and is the formula itself elsewhere. Compiled, that formula
would read and compute its input twice: for the largest value, then for rounding.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flowfleet.hardware import devices

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
SMALLEST_MAX = torch.finfo(torch.float32).tiny * FP8_MAX
"""A row's largest value counts as at least this, so that a row of zeros has a scale."""

Rows = tuple[Tensor, Tensor]
"""(M, K) float8_e4m3fn and scales (M, 1) float32."""


def quantize_rows(x: Tensor, factors: Tensor | None = None) -> Rows:
    """Rounds (M, K) of any float dtype: values * scale is x, rounded. A row's largest value becomes 448, the largest of
    the format; a row of zeros stays one. `factors` (K,) float32: columns are multiplied by them first. No gradient."""
    quantized, scale = _quantize_rows(x, factors)
    return quantized, scale


def formula(x: Tensor, factors: Tensor | None = None) -> Rows:
    """Computes the result of `quantize_rows` with torch's own operations."""
    precise = x.float() if factors is None else x.float() * factors
    largest = precise.abs().amax(dim=1, keepdim=True).clamp(min=SMALLEST_MAX)
    return (precise * (FP8_MAX / largest)).clamp(-FP8_MAX, FP8_MAX).to(FP8), largest * (1 / FP8_MAX)


HAS_TRITON = find_spec("triton") is not None
operator: Any = torch.library.triton_op if HAS_TRITON else torch.library.custom_op
"""Registers a function as an operator of torch, whose Triton kernels torch.compile sees where they are launched."""


@operator("flowfleet::quantize_rows", mutates_args=())  # type: ignore[untyped-decorator]
def _quantize_rows(x: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    if devices.has_triton(x.device):
        from flowfleet.quantization import rows_triton

        return rows_triton.quantize_rows(x, factors)
    return formula(x, factors)


if not HAS_TRITON:

    @_quantize_rows.register_fake  # type: ignore[untyped-decorator]
    def _(x: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.empty(x.shape, dtype=FP8, device=x.device), torch.empty(len(x), 1, device=x.device)
