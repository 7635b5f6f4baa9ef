"""The Triton kernels compile for the generations of NVIDIA's GPUs that we support, without one."""

# Triton is not installed where types are checked.
# mypy: disable-error-code="import-not-found, import-untyped"

from importlib.util import find_spec
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton: install a CUDA build of torch, or triton alone"
)
SMALL_SHARED_BYTES = 99 * 1024
"""Shared memory of a program on the smallest of them, capabilities 8.9 and 12.0."""
WIDTHS = (1024, 3072, 12288)
"""Widths of hidden states and inside an MLP."""


def compiled(kernel: Any, capability: int, tensors: dict[str, str], constants: dict[str, Any], warps: int) -> Any:
    """`tensors`: types of the arguments that are no constants, in Triton's words."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else tensors[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


@needs_triton
@pytest.mark.parametrize("capability", [89, 90, 100, 120])
@pytest.mark.parametrize("width", WIDTHS)
def test_quantizing_kernels_compile_where_products_are_in_float8(capability: int, width: int) -> None:
    from flowfleet.quantization import fused_triton, rows_triton

    block, warps = rows_triton.shape_of_rows(width)
    rows = {"rows": "*fp8e4nv", "scales": "*fp32", "width": "i32"}
    norm = dict.fromkeys(("source", "gates", "changes", "shifts", "factors", "totals", "values"), "*bf16")
    norm |= dict.fromkeys(("gate_stride", "shift_stride", "factor_stride", "tokens"), "i32")
    quantize = {"source": "*bf16", "factors": "*fp32", "target": "*fp8e4nv"}
    kernels: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
        *((rows_triton._quantize_row, quantize | rows, {"HAS_FACTORS": has}) for has in (False, True)),
        (fused_triton._gelu_row, {"source": "*bf16", "values": "*bf16"} | rows, {}),
        *((fused_triton._norm_row, norm | rows | {"eps": "fp32"}, {"HAS_CHANGE": has}) for has in (False, True)),
    ]
    for kernel, tensors, constants in kernels:
        found = compiled(kernel, capability, tensors, constants | {"BLOCK": block}, warps)
        assert found.metadata.shared <= SMALL_SHARED_BYTES
        assert found.asm["cubin"]


@needs_triton
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_other_kernels_compile_on_older_ones_too(capability: int) -> None:
    from flowfleet.quantization import heads_triton
    from flowfleet.weights import hashing_triton

    heads = dict.fromkeys(("text", "image", "text_weight", "image_weight", "output"), "*bf16")
    heads |= {"text_freqs": "*fp32", "image_freqs": "*fp32", "eps": "fp32"}
    heads |= dict.fromkeys(("num_text", "num_tokens", "num_heads"), "i32")
    flags = {"HAS_TEXT_NORM": True, "HAS_IMAGE_NORM": True, "HEADS": heads_triton._HEADS, "WIDTH": 128}
    sums = dict.fromkeys(("addresses", "sizes", "partial"), "*i64")
    sizes = {"PROGRAMS": hashing_triton._PROGRAMS, "BLOCK": hashing_triton._BLOCK}
    kernels: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
        (heads_triton._joint_heads, heads, flags),
        (hashing_triton._partial_sums, sums, sizes),
    ]
    for kernel, tensors, constants in kernels:
        found = compiled(kernel, capability, tensors, constants, 4)
        assert found.metadata.shared <= SMALL_SHARED_BYTES
        assert found.asm["cubin"]
