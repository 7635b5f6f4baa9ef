"""Sums over the mixed words of tensors: the content part of `weights.tensor_hashes`, on the tensors' device.

On CUDA one Triton kernel reads every tensor once, in one launch for all; elsewhere torch's own operations do, which
read the words a dozen times. Both give the same 64 bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowfleet.hardware import devices

GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64's step."""
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Factors of the hash's finalizer."""
_CHUNK_WORDS = 2**22


def content_sums(tensors: Sequence[Tensor]) -> Tensor:
    """(n,) int64 on the tensors' device, which is the same for all: a sum for each, modulo 2^64. Does not wait for it.

    A tensor's bytes, padded with zeros to whole 8-byte little-endian words w_i, give the sum over i of
    mix(w_i + (i + 1) GOLDEN), where mix is the finalizer of SplitMix64.
    """
    plain = [tensor.detach().contiguous() for tensor in tensors]
    if not plain:
        return torch.empty(0, dtype=torch.int64)
    if devices.has_triton(plain[0].device):
        from flowfleet.weights import hashing_triton

        return hashing_triton.content_sums(plain)
    return torch.stack([_content_sum(tensor) for tensor in plain])


def signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value


def _content_sum(tensor: Tensor) -> Tensor:
    words = _words(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        key = torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=tensor.device)
        total += _mix(key.mul_(signed(GOLDEN)).add_(part)).sum()
    return total


def _mix(x: Tensor) -> Tensor:
    """Finalizer of SplitMix64 (Steele, Lea, Flood 2014) on int64, in place; torch's arithmetic wraps."""
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(signed(factor))
    return x.bitwise_xor_((x >> 31).bitwise_and_(2**33 - 1))


def _words(tensor: Tensor) -> Tensor:
    data = tensor.reshape(-1).view(torch.uint8)
    if data.numel() % 8 == 0 and data.storage_offset() % 8 == 0:
        return data.view(torch.int64)
    padded = torch.zeros(-(-data.numel() // 8) * 8, dtype=torch.uint8, device=data.device)
    padded[: data.numel()] = data
    return padded.view(torch.int64)
