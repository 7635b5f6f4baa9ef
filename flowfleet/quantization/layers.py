"""A transformer's large linears in float8: copies next to weights that are still received or trained, or in place of
the weights.

`add_copies` leaves parameters with names, shapes and dtypes, for weights are what an update brings and what is hashed;
`refresh` derives the copies again. `replace_weights` keeps nothing else: the quantized base is then the model
(`model.base = "fp8"`). Both work on `nn.Linear`, below PEFT's layers too, and on vLLM's linear layers, which multiply
by their `quant_method`; `replace_weights` rounds the experts of a mixture as well (experts.py). Linears of an adapter
are left alone. `train_in_fp8` is for a trainer of all weights (`trainer.quantization`), which rounds them each time.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from flowfleet.hardware import devices
from flowfleet.quantization import adapted, experts
from flowfleet.quantization.products import fp8_linear, fp8_trained_linear
from flowfleet.quantization.rows import FP8, Rows, quantize_rows

MIN_SIZE = int(os.environ.get("FLOWFLEET_FP8_MIN_SIZE", "1024"))
"""Smaller linears gain nothing. Benches of tiny models lower it, for all processes of a stack alike."""
MULTIPLE = 16
"""Number that both sides of a weight must be a multiple of, for the kernels."""

_OTHERS = re.compile(r"(^|[._])(mod|modulation|norm\d*(_context)?|adaln\w*|lora_\w+)([._]|$)", re.IGNORECASE)
"""Linears that make shifts and gates of the time embedding (a row a sample, and what they make is sensitive), and those
of an adapter."""


class Fp8Linear(nn.Linear):
    """An `nn.Linear` whose product is made in float8, with `fp8_weight`. Made of one by swapping the class."""

    fp8_weight: Tensor
    fp8_scale: Tensor

    def forward(self, input: Tensor, rows: Rows | None = None) -> Tensor:
        return fp8_linear(input, self.fp8_weight, self.fp8_scale, self.bias, rows=rows)


class Fp8Base(Fp8Linear):
    """Linear whose weight is in float8 itself."""

    fp8_ones: Tensor
    """(1, in_features) float32: to make them for each backward would launch a kernel every time."""

    def forward(self, input: Tensor, rows: Rows | None = None) -> Tensor:
        return fp8_linear(input, self.weight, self.fp8_scale, self.bias, rows=rows, ones=self.fp8_ones)


class Fp8Trained(Fp8Linear):
    """Linear whose weight is trained, and rounded for each product. It has no copy."""

    def forward(self, input: Tensor, rows: Rows | None = None) -> Tensor:
        return fp8_trained_linear(input, self.weight, self.bias, rows=rows)


class Fp8Method:
    """Float8 method of vLLM's linear layers, in place of their usual `plain` one."""

    def __init__(self, plain: Any) -> None:
        self.plain = plain

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8_linear(x, layer.fp8_weight, layer.fp8_scale, bias)


def is_quantized(linear: nn.Module) -> bool:
    """Returns True if a linear multiplies in float8 and takes quantized rows. Looks below an adapter."""
    return isinstance(getattr(linear, "base_layer", linear), Fp8Linear)


def project(x: Tensor, linears: Sequence[nn.Module], rows: Rows | None = None) -> list[Tensor]:
    """Products of one input with several linears, adapters included. Float8 ones share its quantized rows, and compiled
    ones take one product with all A matrices. `rows`: x quantized already, for float8 linears."""
    shared: dict[str, Any] = {}
    if all(map(is_quantized, linears)):
        shared["rows"] = rows or quantize_rows(x.detach().reshape(-1, x.shape[-1]))
    downs = adapted.shared_down(x, linears)
    if downs is None:
        return [linear(x, **shared) for linear in linears]
    return [linear(x, **shared, down=down) for linear, down in zip(linears, downs, strict=True)]


def add_copies(blocks: Iterable[nn.Module], *, min_size: int | None = None) -> int:
    """Makes the blocks' large linears compute in float8; returns how many. Asks nothing of the device: the CPU
    multiplies so as well, slowly. `min_size`: rows and columns of a large one; None: `MIN_SIZE`."""
    linears = list(large_linears(blocks, min_size))
    for linear in linears:
        weight = cast(Tensor, linear.weight)
        linear.register_buffer("fp8_weight", torch.empty_like(weight, dtype=FP8), persistent=False)
        _add_scale(linear)
        _derive(linear)
        if isinstance(linear, nn.Linear):
            linear.__class__ = Fp8Linear
        else:
            linear.quant_method = cast(Any, Fp8Method(linear.quant_method))
    return len(linears)


def refresh(modules: Iterable[nn.Module]) -> None:
    """Derives copies again from the current weights; no effect on modules without."""
    for module in modules:
        if "fp8_weight" in module._buffers:
            _derive(module)


@contextmanager
def full_precision(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, linears with float8 copies multiply by their weights as they are; no effect on modules without copies."""
    linears = [module for module in modules if "fp8_weight" in module._buffers]
    methods = [getattr(linear, "quant_method", None) for linear in linears]
    try:
        for linear in linears:
            if isinstance(linear, nn.Linear):
                linear.__class__ = nn.Linear
            else:
                linear.quant_method = cast(Any, linear.quant_method).plain
        yield
    finally:
        for linear, method in zip(linears, methods, strict=True):
            if isinstance(linear, nn.Linear):
                linear.__class__ = Fp8Linear
            else:
                linear.quant_method = cast(Any, method)


@torch.no_grad()
def replace_weights(blocks: Iterable[nn.Module], *, min_size: int | None = None) -> int:
    """Rounds the weights of large linears and experts to float8, which replaces them, one at a time; returns how many
    linears. Layers of vLLM get copies instead. What is a float8 base already stays as it is."""
    count, blocks = 0, list(blocks)
    for module, name in large_experts(blocks, min_size):
        experts.replace(module, name)
    for linear in list(large_linears(blocks, min_size)):
        if isinstance(linear, Fp8Base):
            continue
        count += 1
        if not isinstance(linear, nn.Linear):
            add_copies([linear], min_size=0)
            continue
        _add_scale(linear)
        ones = torch.ones(1, linear.in_features, device=linear.weight.device)
        linear.register_buffer("fp8_ones", ones, persistent=False)
        quantized, scale = quantize_rows(linear.weight)
        linear.weight = nn.Parameter(quantized, requires_grad=False)
        cast(Tensor, linear.fp8_scale).copy_(scale.t())
        linear.__class__ = Fp8Base
    return count


def train_in_fp8(blocks: Iterable[nn.Module], *, min_size: int | None = None) -> int:
    """Makes large linears multiply in float8, forward and for the gradients of their inputs; returns how many. Their
    parameters stay as they are, and may be on the meta device. Experts of a mixture stay in their own dtype."""
    linears = [linear for linear in large_linears(blocks, min_size) if isinstance(linear, nn.Linear)]
    for linear in linears:
        linear.__class__ = Fp8Trained
    return len(linears)


def adopt(linear: nn.Linear, base: Fp8Base) -> None:
    """Makes a linear the float8 base that another one is, on the same memory, but for the bias."""
    linear.weight = nn.Parameter(base.weight.detach(), requires_grad=False)
    linear.register_buffer("fp8_scale", base.fp8_scale, persistent=False)
    linear.register_buffer("fp8_ones", base.fp8_ones, persistent=False)
    linear.__class__ = Fp8Base


def large_linears(blocks: Iterable[nn.Module], min_size: int | None = None) -> Iterator[nn.Module]:
    """The blocks' linears that are worth it, modulation and adapters left out."""
    least = MIN_SIZE if min_size is None else min_size
    for block in blocks:
        for name, module in block.named_modules():
            if _is_linear(module) and not _OTHERS.search(name):
                sides = cast(Tensor, module.weight).shape
                if min(sides) >= least and all(side % MULTIPLE == 0 for side in sides):
                    yield module


def large_experts(
    blocks: Iterable[nn.Module], min_size: int | None = None
) -> Iterator[tuple[experts.ExpertWeights, str]]:
    """The blocks' matrices of experts that are worth it, by module and parameter."""
    return experts.expert_weights(blocks, MIN_SIZE if min_size is None else min_size, MULTIPLE)


def require_fp8(device: torch.device, dtype: torch.dtype, setting: str, *, emulated: bool = False) -> None:
    """Raises ValueError, which begins with `setting`, for a device or a dtype of a model without such products.
    `emulated`: a CPU will do, slowly."""
    if not devices.has_fp8(device) and not (emulated and device.type == "cpu"):
        raise ValueError(
            f"{setting} needs float8 matrix products with row-wise scales, which {devices.name_of(device)} here lacks: "
            "use NVIDIA GPUs of compute capability 8.9 or newer, or leave it out"
        )
    if dtype != torch.bfloat16:
        raise ValueError(f"{setting} works on models in bfloat16, not {dtype}: set model.dtype")


def _is_linear(module: nn.Module) -> bool:
    """torch's, or one of vLLM's: those have a weight (N, K) and a `quant_method` that multiplies."""
    if isinstance(module, nn.Linear):
        return True
    weight = getattr(module, "weight", None)
    return hasattr(getattr(module, "quant_method", None), "apply") and isinstance(weight, Tensor) and weight.ndim == 2


def _add_scale(linear: nn.Module) -> None:
    weight = cast(Tensor, linear.weight)
    scale = torch.empty(1, len(weight), dtype=torch.float32, device=weight.device)
    linear.register_buffer("fp8_scale", scale, persistent=False)


@torch.no_grad()
def _derive(linear: nn.Module) -> None:
    quantized, scale = quantize_rows(cast(Tensor, linear.weight))
    cast(Tensor, linear.fp8_weight).copy_(quantized)
    cast(Tensor, linear.fp8_scale).copy_(scale.t())
