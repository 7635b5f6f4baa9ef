"""Storage of AdamW's two moments, by `trainer.optimizer.state`.

A store yields `Piece`s: parts of the trained weights, each with its gradient and both moments in fp32 on its device, to
be updated in place. When the next pieces are requested, the store puts the moments back:

    device  fp32 next to the weights: 8 bytes per element there
    host    fp32 in pinned host memory, streamed through the device in three slots, so that one is fetched and another
            written back while a third is used
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


def make_moments(state: str, shards: Mapping[str, Tensor]) -> Moments:
    """Zeros for every shard. `state`: of `trainer.optimizer.state`."""
    kinds: dict[str, Any] = {"device": DeviceMoments, "host": HostMoments, "8bit": QuantizedMoments}
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
    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        self._device = next(iter(shards.values())).device
        self._is_pinned = devices.is_accelerator(self._device)
        self._buckets = _buckets({name: shard.numel() for name, shard in shards.items()})
        self._host = [
            torch.zeros(2, sum(bucket.values()), dtype=torch.float32, pin_memory=self._is_pinned)
            for bucket in self._buckets
        ]
        self._shapes = {name: shard.shape for name, shard in shards.items()}

    def pieces(self, shards: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> Iterator[list[Piece]]:
        width = max(host.shape[1] for host in self._host)
        slots = [_Slot(width, self._device) for _ in range(_SLOTS)]
        used = [number for number, bucket in enumerate(self._buckets) if any(name in grads for name in bucket)]
        for position, number in enumerate(used):
            if position == 0:
                slots[0].fetch(self._host[number])
            if position + 1 < len(used):
                slots[(position + 1) % _SLOTS].fetch(self._host[used[position + 1]])
            slot = slots[position % _SLOTS]
            first, second = slot.begin()
            yield [
                Piece(shards[name], grads[name], exp_avg, second_views[name])
                for second_views in [self._views(number, second)]
                for name, exp_avg in self._views(number, first).items()
                if name in grads
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

    def fetch(self, host: Tensor) -> None:
        """Starts to copy a bucket's moments to the device, after this slot's earlier write-back."""
        self._host = host
        with self._stream or nullcontext():
            self._part().copy_(host, non_blocking=True)

    def begin(self) -> tuple[Tensor, Tensor]:
        """Returns both moments, flat; the caller's computation is ordered after the copy."""
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)
        first, second = self._part()
        return first, second

    def write_back(self) -> None:
        """Starts to copy the moments to the host, after the caller's computation."""
        if self._stream is None:
            self._host.copy_(self._part())
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            self._host.copy_(self._part(), non_blocking=True)

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


def _buckets(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Names and sizes in order, together at most `BUCKET_ELEMENTS`, or one that is larger."""
    buckets: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if buckets[-1] and sum(buckets[-1].values()) + size > BUCKET_ELEMENTS:
            buckets.append({})
        buckets[-1][name] = size
    return buckets


def _chunks(shard: Tensor) -> list[slice]:
    """Rows of a shard in parts of about `CHUNK_ELEMENTS`; none if it is empty."""
    num_rows = len(shard)
    step = max(1, CHUNK_ELEMENTS // max(1, shard[0].numel())) if num_rows else 1
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
