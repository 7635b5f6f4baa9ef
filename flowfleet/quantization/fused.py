"""Operations before a float8 product, fused with its quantization: GELU, or residual, normalization and modulation.

On CUDA each is one Triton kernel (fused_triton.py); elsewhere it is the formula itself, by torch's own operations,
which round after each. Results hold both the values, for adapters and gradients, and their float8 rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flowfleet.hardware import devices
from flowfleet.quantization.rows import FP8, HAS_TRITON, Rows, operator, quantize_rows

ALLOWED = True
"""False leaves models as they are, for comparisons."""

_INNER = 2 * (2 / torch.pi) ** 0.5
_CUBE = 0.044715


def is_on(device: torch.device) -> bool:
    """Returns True if models use these operations on the device."""
    return ALLOWED and devices.has_triton(device)


def gelu_rows(x: Tensor) -> tuple[Tensor, Rows]:
    """GELU by its tanh formula of x (..., K): values, and rows of them (M, K)."""
    values, quantized, scale = _gelu_rows(x.reshape(-1, x.shape[-1]))
    return values.view(x.shape), (quantized, scale)


def norm_rows(x: Tensor, modulation: Tensor, eps: float) -> tuple[Tensor, Rows, Tensor]:
    """Layer norm of x (B, T, K), times 1 + scale, plus shift.

    Args:
        modulation: (B, 3 K): shift, scale and gate, as diffusers has them.

    Returns values (B, T, K), rows of them (B T, K), and the gate (B, 1, K), which is for what is made of the values.
    """
    shift, scale, gate = modulation.chunk(3, dim=-1)
    _, values, quantized, scales = _norm_rows(x, None, None, shift, scale, eps)
    return values, (quantized, scales), gate[:, None]


def residual_norm_rows(
    x: Tensor, gate: Tensor, change: Tensor, modulation: Tensor, eps: float
) -> tuple[Tensor, Tensor, Rows, Tensor]:
    """The sum x + gate · change, then what `norm_rows` returns of it. `gate` is (B, 1, K), `change` like x."""
    shift, scale, next_gate = modulation.chunk(3, dim=-1)
    total, values, quantized, scales = _norm_rows(x, gate[:, 0], change, shift, scale, eps)
    return total, values, (quantized, scales), next_gate[:, None]


@operator("flowfleet::gelu_rows", mutates_args=())  # type: ignore[untyped-decorator]
def _gelu_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if devices.has_triton(x.device):
        from flowfleet.quantization import fused_triton

        return fused_triton.gelu_rows(x)
    return gelu_formula(x)


def gelu_formula(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the result of `_gelu_rows` with torch's own operations."""
    values = F.gelu(x, approximate="tanh")
    return values, *quantize_rows(values)


@operator("flowfleet::norm_rows", mutates_args=())  # type: ignore[untyped-decorator]
def _norm_rows(
    x: Tensor, gate: Tensor | None, change: Tensor | None, shift: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum, values, rows and their scales; the sum is empty without a change."""
    if devices.has_triton(x.device):
        from flowfleet.quantization import fused_triton

        return fused_triton.norm_rows(x, gate, change, shift, scale, eps)
    return norm_formula(x, gate, change, shift, scale, eps)


def norm_formula(
    x: Tensor, gate: Tensor | None, change: Tensor | None, shift: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the result of `_norm_rows` with torch's own operations, in diffusers' order."""
    total = x if gate is None or change is None else x + gate[:, None] * change
    normed = F.layer_norm(total, (x.shape[-1],), eps=eps)
    values = normed * (1 + scale[:, None]) + shift[:, None]
    rows, scales = quantize_rows(values.view(-1, x.shape[-1]))
    return x.new_empty(0) if change is None else total, values, rows, scales


# Gradients ------------------------------------------------------------------------------------------------------------


def _keep_gelu(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.mark_non_differentiable(*output[1:])


def _gelu_backward(ctx: Any, grad: Tensor, *_: Any) -> Tensor:
    """d/dx of x · s(u), u = 2 √(2/π) (x + 0.044715 x³) and s the logistic function, which is GELU's tanh formula."""
    (saved,) = ctx.saved_tensors
    x = saved.float()
    share = torch.sigmoid(_INNER * (x + _CUBE * x**3))
    slope = share + x * share * (1 - share) * _INNER * (1 + 3 * _CUBE * x**2)
    into: Tensor = (grad.float() * slope).to(grad.dtype)
    return into


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, gate, change, _, scale, ctx.eps = inputs
    ctx.has_change = change is not None
    kept = (output[0], gate, change) if ctx.has_change else (x,)
    ctx.save_for_backward(scale, *kept)
    ctx.mark_non_differentiable(*output[2:], *(() if ctx.has_change else output[:1]))


def _norm_backward(ctx: Any, grad_total: Tensor, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    scale, saved, *others = ctx.saved_tensors
    total, into = saved.float(), grad.float()
    centered = total - total.mean(dim=-1, keepdim=True)
    inverse = torch.rsqrt(centered.square().mean(dim=-1, keepdim=True) + ctx.eps)
    normed, through = centered * inverse, into * (1 + scale.float()[:, None])
    of_norm = through - through.mean(dim=-1, keepdim=True) - normed * (through * normed).mean(dim=-1, keepdim=True)
    of_total = of_norm * inverse
    of_gate = of_change = None
    if ctx.has_change:
        gate, change = others
        of_total = of_total + grad_total.float()
        of_change = (of_total * gate.float()[:, None]).to(change.dtype)
        of_gate = (of_total * change.float()).sum(dim=1).to(gate.dtype) if ctx.needs_input_grad[1] else None
    of_shift = into.sum(dim=1).to(scale.dtype) if ctx.needs_input_grad[3] else None
    of_scale = (into * normed).sum(dim=1).to(scale.dtype) if ctx.needs_input_grad[4] else None
    return of_total.to(saved.dtype), of_gate, of_change, of_shift, of_scale, None


_gelu_rows.register_autograd(_gelu_backward, setup_context=_keep_gelu)
_norm_rows.register_autograd(_norm_backward, setup_context=_keep_norm)

if not HAS_TRITON:

    @_gelu_rows.register_fake  # type: ignore[untyped-decorator]
    def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(x), x.new_empty(x.shape, dtype=FP8), x.new_empty(len(x), 1, dtype=torch.float32)

    @_norm_rows.register_fake  # type: ignore[untyped-decorator]
    def _(
        x: Tensor, gate: Tensor | None, change: Tensor | None, shift: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch, tokens, width = x.shape
        rows = x.new_empty(batch * tokens, width, dtype=FP8)
        total = x.new_empty(0) if change is None else torch.empty_like(x)
        return total, torch.empty_like(x), rows, x.new_empty(batch * tokens, 1, dtype=torch.float32)
