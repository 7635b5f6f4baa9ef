"""`flowfleet.weights.hashing.content_sums` as one Triton kernel. Import it only where Triton is: with torch on CUDA.

A row of programs takes a tensor, each a share of its words; their partial sums are added in the end, without atomics.
"""

# Triton is not installed where types are checked, and its kernels are written without.
# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowfleet.hardware import devices
from flowfleet.weights.hashing import FACTORS, GOLDEN, signed

_PROGRAMS = 64
"""Programs launched per tensor."""
_BLOCK = 1024
"""Words that a program takes at once."""

_GOLDEN = tl.constexpr(signed(GOLDEN))
_FACTOR_1 = tl.constexpr(signed(FACTORS[0]))
_FACTOR_2 = tl.constexpr(signed(FACTORS[1]))
_LOW_34 = tl.constexpr(2**34 - 1)
_LOW_37 = tl.constexpr(2**37 - 1)
_LOW_33 = tl.constexpr(2**33 - 1)


def content_sums(tensors: Sequence[Tensor]) -> Tensor:
    """(n,) int64 of n ≥ 1 contiguous tensors on one device. Two small launches, no wait."""
    device = tensors[0].device
    aligned = [tensor if tensor.data_ptr() % 8 == 0 else tensor.clone() for tensor in tensors]
    table = [[tensor.data_ptr() for tensor in aligned], [tensor.nbytes for tensor in aligned]]
    places = torch.tensor(table, dtype=torch.int64).to(device, non_blocking=True)
    partial = torch.empty(len(aligned), _PROGRAMS, dtype=torch.int64, device=device)
    with devices.bound(device):
        _partial_sums[(len(aligned), _PROGRAMS)](places[0], places[1], partial, PROGRAMS=_PROGRAMS, BLOCK=_BLOCK)
    return partial.sum(1)


@triton.jit
def _mix(x):
    """Shifts of int64 keep the sign, so the upper bits are masked away."""
    x = (x ^ ((x >> 30) & _LOW_34)) * _FACTOR_1
    x = (x ^ ((x >> 27) & _LOW_37)) * _FACTOR_2
    return x ^ ((x >> 31) & _LOW_33)


@triton.jit
def _partial_sums(addresses, sizes, partial, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, j): the blocks j, j + PROGRAMS, … of tensor t's whole words, and for j = 0 the bytes behind them."""
    tensor = tl.program_id(0)
    program = tl.program_id(1).to(tl.int64)
    address = tl.load(addresses + tensor)
    num_bytes = tl.load(sizes + tensor)
    num_words = num_bytes // 8
    words = address.to(tl.pointer_type(tl.int64))
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(program * BLOCK, num_words, PROGRAMS * BLOCK):
        index = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = index < num_words
        word = tl.load(words + index, mask=inside, other=0)
        total += tl.where(inside, _mix(word + (index + 1) * _GOLDEN), 0)
    lane = tl.arange(0, 8).to(tl.int64)
    offset = num_words * 8 + lane
    byte = tl.load(address.to(tl.pointer_type(tl.uint8)) + offset, mask=offset < num_bytes, other=0)
    tail = _mix(tl.sum(byte.to(tl.int64) << (8 * lane)) + (num_words + 1) * _GOLDEN)
    has_tail = (program == 0) & (num_bytes % 8 != 0)
    tl.store(partial + tensor * PROGRAMS + program, tl.sum(total) + tl.where(has_tail, tail, 0))
