"""Faster forwards of the live transformers, in place: blocks compiled, their large linears in float8.

    load → accelerate → install LoRA → receive weights → refresh → …

`compile` makes each block compile itself at its first forward. All blocks share the compiled code, and from the second
text width or batch size on these are dynamic, so a run compiles a handful of times.

`fp8` multiplies in e4m3 with a scale for each row: of an activation the token's, found as it comes (max |x| / 448, in
float32), of a weight the output channel's. It is meant to go with `compile`, which fuses that search and the rounding
into a kernel or two. The weights themselves stay as they are, in bfloat16: they are what an update brings and what is
hashed. The float8 copies are derived from them, again by `refresh` after each update. LoRA's small matrices are not
touched.

Parameters keep names, shapes and dtypes. Works on `nn.Linear`, below PEFT's layers too, and on vLLM's linear layers,
which multiply by their `quant_method`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn

from flowfleet.hardware import devices
from flowfleet.process.pulse import Pulse

Experts = Mapping[str, nn.Module]

QUANTIZATIONS = ("none", "fp8")
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
MIN_SIZE = 1024
"""Smaller linears gain nothing."""
MULTIPLE = 16
"""What the kernels want both sides of a weight to be a multiple of."""
MAX_RECOMPILES = 64
"""Maximum compiled variants of the blocks' common code: with and without mask, adapter or static sizes, for each of two
experts."""

_watching: WeakSet[Pulse] = WeakSet()

_MODULATION = re.compile(r"(^|[._])(mod|modulation|norm\d*(_context)?|adaln\w*)([._]|$)", re.IGNORECASE)
"""Linears that make shifts and gates of the time embedding: a row a sample, and what they make is sensitive."""


def accelerate(experts: Experts, *, compile: bool, quantization: str) -> None:
    """Prepares transformers in place; see the module. To be called once after a load, before LoRA is installed.

    Args:
        experts: transformers by component name.
        compile: whether blocks compile themselves.
        quantization: "none" (or empty) or "fp8".

    Raises ValueError for another quantization, fp8 on a device or in a dtype that has no such kernels, and transformers
    that do not say what their blocks are.
    """
    if quantization not in ("", *QUANTIZATIONS):
        raise ValueError(f"rollout.quantization = {quantization!r}: give one of {', '.join(QUANTIZATIONS)}")
    if quantization == "fp8":
        for expert in experts.values():
            _require_fp8(expert)
        quantize(experts)
    if compile:
        compile_blocks(experts)


def refresh(experts: Experts) -> None:
    """Derives the float8 copies again from the current weights; no effect without quantization."""
    for expert in experts.values():
        for module in expert.modules():
            if "fp8_weight" in module._buffers:
                _derive(module)


def compile_blocks(experts: Experts, backend: str = "inductor") -> None:
    """Makes each block compile itself at its first forward, by one of torch.compile's backends. Raises ValueError as
    `blocks` does."""
    config = cast(Any, torch._dynamo.config)
    config.recompile_limit = max(config.recompile_limit, MAX_RECOMPILES)
    for expert in experts.values():
        for block in blocks(expert).values():
            block.compile(backend=backend)


def watch_compilation(pulse: Pulse) -> None:
    """Tells a pulse from now on when code of this process compiles."""
    from torch._dynamo.callback import callback_handler

    if pulse not in _watching:
        _watching.add(pulse)
        callback_handler.register_start_callback(lambda _: pulse.compiling(True))
        callback_handler.register_end_callback(lambda _: pulse.compiling(False))


def quantize(experts: Experts, *, min_size: int = MIN_SIZE) -> int:
    """Makes the blocks' linears of at least `min_size` rows and columns compute in float8; returns how many. Asks
    nothing of the device: the CPU multiplies so as well, slowly."""
    linears = [linear for expert in experts.values() for linear in _large_linears(expert, min_size)]
    for linear in linears:
        weight = cast(Tensor, linear.weight)
        linear.register_buffer("fp8_weight", torch.empty_like(weight, dtype=FP8), persistent=False)
        scale = torch.empty(1, len(weight), dtype=torch.float32, device=weight.device)
        linear.register_buffer("fp8_scale", scale, persistent=False)
        _derive(linear)
        if isinstance(linear, nn.Linear):
            linear.__class__ = Fp8Linear
        else:
            linear.quant_method = cast(Any, Fp8Method())
    return len(linears)


def blocks(expert: nn.Module) -> dict[str, nn.Module]:
    """The transformer's repeated blocks by name, after the class names that diffusers' and vLLM-Omni's models list."""
    names = {*(getattr(expert, "_no_split_modules", None) or ()), *(getattr(expert, "_repeated_blocks", None) or ())}
    found = {name: module for name, module in expert.named_modules() if type(module).__name__ in names}
    if not found:
        raise ValueError(
            f"{type(expert).__name__} does not name its blocks: set its class attribute _no_split_modules to "
            f"their class names, or turn rollout.compile and rollout.quantization off; it has {sorted(names)} now"
        )
    return found


class Fp8Linear(nn.Linear):
    """An `nn.Linear` whose product is made in float8. Made of one by `quantize`, which swaps the class."""

    fp8_weight: Tensor
    fp8_scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return fp8_linear(input, self.fp8_weight, self.fp8_scale, self.bias)


class Fp8Method:
    """What vLLM's linear layers multiply by, in float8."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8_linear(x, layer.fp8_weight, layer.fp8_scale, bias)


def fp8_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b in the dtype of `x`, with x quantized row by row.

    Args:
        x: (..., K) bfloat16.
        weight: (N, K) float8_e4m3fn, contiguous.
        weight_scale: (1, N) float32; weight * weight_scaleᵀ is what was quantized.
        bias: (N,) of the dtype of `x`, or None.
    """
    rows = x.reshape(-1, x.shape[-1])
    quantized, scale = quantize_rows(rows)
    product = torch._scaled_mm(
        quantized,
        weight.t(),
        scale_a=scale,
        scale_b=weight_scale,
        bias=bias,
        out_dtype=x.dtype,
        use_fast_accum=True,
    )
    return product.reshape(*x.shape[:-1], len(weight))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(M, K) of any float dtype to float8_e4m3fn and its scales (M, 1) float32: values * scale is x, rounded. A row's
    largest value becomes 448, the largest of the format; a row of zeros stays one."""
    precise = x.float()
    largest = precise.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * FP8_MAX)
    scale = largest / FP8_MAX
    return (precise / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def _large_linears(expert: nn.Module, min_size: int) -> Iterator[nn.Module]:
    for block in blocks(expert).values():
        for name, module in block.named_modules():
            if _is_linear(module) and not _MODULATION.search(name):
                sides = cast(Tensor, module.weight).shape
                if min(sides) >= min_size and all(side % MULTIPLE == 0 for side in sides):
                    yield module


def _is_linear(module: nn.Module) -> bool:
    """torch's, or one of vLLM's: those have a weight (N, K) and a `quant_method` that multiplies."""
    if isinstance(module, nn.Linear):
        return True
    weight = getattr(module, "weight", None)
    return hasattr(getattr(module, "quant_method", None), "apply") and isinstance(weight, Tensor) and weight.ndim == 2


@torch.no_grad()
def _derive(linear: nn.Module) -> None:
    quantized, scale = quantize_rows(cast(Tensor, linear.weight))
    cast(Tensor, linear.fp8_weight).copy_(quantized)
    cast(Tensor, linear.fp8_scale).copy_(scale.t())


def _require_fp8(expert: nn.Module) -> None:
    parameter = next(expert.parameters())
    if not devices.has_fp8(parameter.device):
        raise ValueError(
            f"rollout.quantization = 'fp8' needs float8 matrix products with row-wise scales, which {parameter.device} "
            "of this replica lacks: use NVIDIA GPUs of compute capability 8.9 or newer, or rollout.quantization = "
            "'none'"
        )
    if parameter.dtype != torch.bfloat16:
        raise ValueError(
            f"rollout.quantization = 'fp8' works on models in bfloat16, not {parameter.dtype}: set model.dtype"
        )
