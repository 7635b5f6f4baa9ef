"""Copies large tensors from host memory to an accelerator at the speed of its bus.

A plain copy has one thread, which waits for each page of a mapped file. Here several fill pinned buffers.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from flowfleet.hardware import devices

_THREADS = 8
_PIECE_BYTES = 2**25
_ALIGNMENT = 64

Pair = tuple[Tensor, Tensor]


@torch.no_grad()
def move(module: nn.Module, device: torch.device | str) -> None:
    """Does what `module.to(device)` does."""
    if devices.is_accelerator(device := torch.device(device)):
        held = [it for it in module.parameters() if it.device.type == "cpu"]
        moved = [torch.empty_like(it, device=device) for it in held]
        copy_all(zip(moved, held, strict=True))
        for parameter, tensor in zip(held, moved, strict=True):
            parameter.data = tensor
    module.to(device)


@torch.no_grad()
def align(module: nn.Module) -> None:
    """Gives parameters in a mapped file, at any multiple of 8 bytes there, memory of their own that begins as every
    allocation does. CPU kernels for few rows sum in another order where it does not, so that processes which load the
    same file differently would compute other bits."""
    for parameter in module.parameters():
        if parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()


@torch.no_grad()
def copy_all(pairs: Iterable[Pair]) -> None:
    """Copies the second of each pair into the first, of the same shape. Waits for the device."""
    pieces: list[Pair] = []
    for target, source in pairs:
        is_plain = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
        if is_plain and devices.is_accelerator(target.device):
            parts = (torch.split(it.view(-1), _PIECE_BYTES // it.element_size()) for it in (target, source))
            pieces += zip(*parts, strict=True)
        else:
            target.copy_(source)
    if pieces:
        device = pieces[0][0].device
        devices.synchronize(device)  # earlier work may still use the targets' memory
        with ThreadPoolExecutor(_THREADS, "staging") as pool:
            list(pool.map(partial(_copy, device), (pieces[start::_THREADS] for start in range(_THREADS))))


def _copy(device: torch.device, pieces: list[Pair]) -> None:
    devices.bind(device)
    stream, buffer = torch.Stream(device=device), devices.byte_buffer(_PIECE_BYTES, torch.device("cpu"))
    with torch.no_grad(), stream:
        for target, source in pieces:
            staged = buffer[: source.nbytes].view(source.dtype).copy_(source)
            target.copy_(staged, non_blocking=True)
            stream.synchronize()  # the buffer is free again
