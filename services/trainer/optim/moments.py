"""Storage of AdamW's two moments, by `trainer.optimizer.state`.

A store yields `Piece`s: parts of the trained weights, each with its gradient and both moments in fp32 on its device, to
be updated in place. When the next pieces are requested, the store puts the moments back:

    device  fp32 next to the weights: 8 bytes per element there
    host    fp32 in pinned host memory, streamed through the device in three slots, so that one is fetched and another
            written back while a third is used; so are weights that are in host memory as well (`trainer.offload`)
    8bit    a byte per element and a scale per block (quantized.py), next to the weights
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flowfleet.hardware import devices
from services.trainer.optim.quantized import QuantizedRows, is_quantized

BUCKET_ELEMENTS = 2**26
"""Elements of the host's pinned buffers, whose sizes torch rounds up to powers of two."""
FAR_BUCKET_ELEMENTS = 2**24
"""The same where the weights are there too: the device is small."""
CHUNK_ELEMENTS = 2**24
"""Elements of a parameter whose moments are decoded at once."""
_SLOTS = 3


@dataclass(frozen=True)
class Piece:
    """Shard of a parameter, its gradient and its moments: equal shapes, on one device."""

    parameter: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Moments(Protocol):
    def pieces(self, shards: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Iterator[list[Piece]]:
        """Pieces of the shards that have a gradient, all by published name. Must be exhausted."""

    def tensors(self) -> dict[str, Tensor]:
        """Returns this rank's part of a checkpoint: `<kind>.<name>`, each tensor with as many rows as its shard. The
        tensors share the store's memory, so loading into them restores it."""


def make_moments(state: str, shards: Mapping[str, Tensor], device: torch.device) -> Moments:
    """Zeros for every shard. `state`: of `trainer.optimizer.state`; shards that are not on `device`, which computes,
    have their moments next to them."""
    is_far = next(iter(shards.values())).device != device
    if state == "host" or is_far:
        return HostMoments(shards, device, with_weights=is_far)
    kinds: dict[str, Any] = {"device": DeviceMoments, "8bit": QuantizedMoments}
    made: Moments = kinds[state](shards)
    return made


class DeviceMoments:
    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        self._first = {name: torch.zeros_like(shard) for name, shard in shards.items()}
        self._second = {name: torch.zeros_like(shard) for name, shard in shards.items()}

    def pieces(self, shards: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Iterator[list[Piece]]:
        yield [Piece(shards[name], grad, self._first[name], self._second[name]) for name, grad in grads.items()]

    def tensors(self) -> dict[str, Tensor]:
        return _named(exp_avg=self._first, exp_avg_sq=self._second)


class HostMoments:
    def __init__(self, shards: Mapping[str, Tensor], device: torch.device, *, with_weights: bool = False) -> None:
        """`with_weights`: the weights stream as well."""
        self._device, self._with_weights = device, with_weights
        limit = FAR_BUCKET_ELEMENTS if with_weights else BUCKET_ELEMENTS
        self._buckets = _buckets({name: shard.numel() for name, shard in shards.items()}, limit)
        host = torch.device("cpu")
        sizes = [sum(bucket.values()) for bucket in self._buckets]
        self._host = [devices.byte_buffer(8 * size, host).view(torch.float32).view(2, size) for size in sizes]
        self._shapes = {name: shard.shape for name, shard in shards.items()}

    def pieces(self, shards: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Iterator[list[Piece]]:
        width = max(host.shape[1] for host in self._host)
        slots = [_Slot(width, self._device) for _ in range(_SLOTS)]
        used = [number for number, bucket in enumerate(self._buckets) if any(name in grads for name in bucket)]

        def fetch(position: int) -> None:
            names = self._buckets[used[position]] if self._with_weights else []
            far = [shards[name] for name in names if name in grads]
            slots[position % _SLOTS].fetch(self._host[used[position]], far)

        for position, number in enumerate(used):
            if position == 0:
                fetch(0)
            if position + 1 < len(used):
                fetch(position + 1)
            slot = slots[position % _SLOTS]
            first, second = (self._views(number, flat) for flat in slot.begin())
            names = [name for name in self._buckets[number] if name in grads]
            values = slot.near or [shards[name] for name in names]
            yield [
                Piece(value, grads[name], first[name], second[name]) for name, value in zip(names, values, strict=True)
            ]
            slot.write_back()
        for slot in slots:
            slot.wait()

    def tensors(self) -> dict[str, Tensor]:
        first, second = (
            {
                name: view
                for number, host in enumerate(self._host)
                for name, view in self._views(number, host[row]).items()
            }
            for row in (0, 1)
        )
        return _named(exp_avg=first, exp_avg_sq=second)

    def _views(self, number: int, flat: Tensor) -> dict[str, Tensor]:
        """A bucket's tensors, on the memory of `flat`, which may be longer."""
        bucket = self._buckets[number]
        parts = torch.split(flat[: sum(bucket.values())], list(bucket.values()))
        return {name: part.view(self._shapes[name]) for name, part in zip(bucket, parts, strict=True)}


class _Slot:
    """Room on the device for a bucket, with a stream of its own for copies on an accelerator."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._device = device
        self._room = torch.empty(2, width, dtype=torch.float32, device=device)
        self._stream = torch.Stream(device=device) if devices.is_accelerator(device) else None
        if self._stream is not None:  # who had this memory before may still use it
            self._stream.wait_stream(torch.accelerator.current_stream(device))
        self._host = torch.empty(0)
        self._far: list[Tensor] = []
        self.near: list[Tensor] = []
        """Weights that were fetched, in the order of those in host memory."""

    def fetch(self, host: Tensor, far: list[Tensor]) -> None:
        """Starts to copy a bucket's moments to the device, and its weights in host memory, after this slot's earlier
        write-back."""
        self._host, self._far = host, far
        with self._stream or nullcontext():
            self._part().copy_(host, non_blocking=True)
            self.near = [weight.to(self._device, non_blocking=True, copy=True) for weight in far]

    def begin(self) -> tuple[Tensor, Tensor]:
        """Returns both moments, flat; the caller's computation is ordered after the copy."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)
        first, second = self._part()
        return first, second

    def write_back(self) -> None:
        """Starts to copy the moments to the host, after the caller's computation."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream or nullcontext():
            self._host.copy_(self._part(), non_blocking=True)
            for weight, near in zip(self._far, self.near, strict=True):
                weight.copy_(near, non_blocking=True)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _part(self) -> Tensor:
        return self._room[:, : self._host.shape[1]]


class QuantizedMoments:
    """Tensors whose rows are too short for blocks stay fp32."""

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        self._plain = DeviceMoments({name: shard for name, shard in shards.items() if not is_quantized(shard)})
        wide = {name: shard for name, shard in shards.items() if is_quantized(shard)}
        self._first = {name: QuantizedRows(shard.shape, shard.device, signed=True) for name, shard in wide.items()}
        self._second = {name: QuantizedRows(shard.shape, shard.device, signed=False) for name, shard in wide.items()}

    def pieces(self, shards: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Iterator[list[Piece]]:
        yield from self._plain.pieces(shards, {name: grad for name, grad in grads.items() if name not in self._first})
        for name in (name for name in grads if name in self._first):
            first, second = self._first[name], self._second[name]
            shard, grad = shards[name], grads[name]
            for rows in _chunks(shard):
                piece = Piece(shard[rows], grad[rows], first.decode(rows), second.decode(rows))
                yield [piece]
                first.encode(rows, piece.exp_avg)
                second.encode(rows, piece.exp_avg_sq)

    def tensors(self) -> dict[str, Tensor]:
        tensors = self._plain.tensors()
        for moment, stored in (("exp_avg", self._first), ("exp_avg_sq", self._second)):
            tensors |= {f"{moment}_codes.{name}": rows.codes for name, rows in stored.items()}
            tensors |= {f"{moment}_scales.{name}": rows.scales for name, rows in stored.items()}
        return tensors


def _named(**kinds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{kind}.{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def _buckets(sizes: Mapping[str, int], limit: int) -> list[dict[str, int]]:
    """Names and sizes in order, together at most `limit`, or one that is larger."""
    buckets: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if buckets[-1] and sum(buckets[-1].values()) + size > limit:
            buckets.append({})
        buckets[-1][name] = size
    return buckets


def _chunks(shard: Tensor) -> list[slice]:
    """Rows of a shard in parts of about `CHUNK_ELEMENTS`; none if it is empty."""
    num_rows = len(shard)
    step = max(1, CHUNK_ELEMENTS // max(1, shard[0].numel())) if num_rows else 1
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
