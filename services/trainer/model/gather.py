"""Whole weights from the ranks' shards, a bucket of many parameters at a time.

FSDP2 spreads a parameter in rows, as `torch.chunk` does: rank r of W has rows r c … (r + 1) c of c = ⌈rows / W⌉, the
last ranks fewer or none. Each rank lays its shards of a bucket's parameters one behind the other, every one in a slot
of c rows, already in the dtype that travels; one all-gather brings the slots of all ranks together, and rank by rank
they are copied to their places. So a bucket costs a handful of calls, however many parameters it has.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from flowfleet.hardware import devices
from flowfleet.proto.rollout_pb2 import Bucket, ParameterSpec
from flowfleet.weights import weights
from services.trainer.parallel.sharding import local, num_shards

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class Gather:
    """Gathers one version of the weights. Every rank goes through all `buckets` in order, each once.

    The all-gathers' memory is allocated here, before the first. A rank that fails inside `fill` must end: the others
    are in that bucket's collective.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: int = weights.BUCKET_BYTES,
        on_bucket: Callable[[], None] = lambda: None,
    ) -> None:
        """`tensors`: DTensors spread by FSDP2, or whole ones that all ranks have alike. They travel in `dtype`.
        `on_bucket` is called after each bucket."""
        self.buckets = weights.make_buckets(weights.specs_of(tensors, dtype), bucket_bytes)
        self._tensors = tensors
        self._device = device
        self._filled = 0
        self._on_bucket = on_bucket
        spread = {name: tensor for name, tensor in tensors.items() if _is_spread(tensor)}
        self._mesh = next(iter(spread.values())).device_mesh if spread else None  # type: ignore[attr-defined]
        self._size = self._mesh.size(-1) if self._mesh is not None else 0
        self._slots = [
            Bucket(parameters=[_slot(spec, self._size) for spec in bucket.parameters if spec.name in spread])
            for bucket in self.buckets
        ]
        largest = max(map(weights.bucket_bytes, self._slots), default=0)
        self._own = torch.empty(largest, dtype=torch.uint8, device=device)
        self._gathered = torch.empty(self._size * largest, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def fill(self, bucket: Bucket, flat: Tensor | None) -> None:
        """Collective. Writes the next bucket's parameters into its (bucket_bytes,) uint8 buffer; None on ranks that
        only take part."""
        assert bucket is self.buckets[self._filled], "buckets come in order"
        slots = self._slots[self._filled]
        spread = {spec.name for spec in slots.parameters}
        if flat is not None:
            places = dict(_by_name(bucket, flat))
            whole = [name for name in places if name not in spread]
            _copy([places[name] for name in whole], [local(self._tensors[name]) for name in whole])
        if spread:
            self._all_gather(slots, bucket, flat)
        self._filled += 1
        self._on_bucket()

    def rest(self) -> None:
        """Collective. Takes part in the remaining buckets, for ranks that need no weights or could not send them."""
        for bucket in self.buckets[self._filled :]:
            self.fill(bucket, None)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Collective, a bucket at a time. Whole tensors by name, on every rank; those of a bucket share memory."""
        for bucket in self.buckets:
            flat = devices.byte_buffer(weights.bucket_bytes(bucket), self._device)
            self.fill(bucket, flat)
            yield from _by_name(bucket, flat)

    def _all_gather(self, slots: Bucket, bucket: Bucket, flat: Tensor | None) -> None:
        assert self._mesh is not None, "the bucket has slots"
        slot_bytes = weights.bucket_bytes(slots)
        sent = self._own[:slot_bytes]
        gathered = self._gathered[: self._size * slot_bytes].view(self._size, slot_bytes)
        shards = [local(self._tensors[spec.name]) for spec in slots.parameters]
        targets = [view[: len(shard)] for (_, view), shard in zip(weights.views(slots, sent), shards, strict=True)]
        _copy(targets, shards)
        _all_gather(gathered.view(-1), sent, group=self._mesh.get_group(self._mesh.ndim - 1))
        if flat is None:
            return
        places = dict(_by_name(bucket, flat))
        targets, parts = [], []
        for rank in range(self._size):
            for spec, view in weights.views(slots, gathered[rank]):
                rows = places[spec.name][rank * len(view) : (rank + 1) * len(view)]
                targets.append(rows)
                parts.append(view[: len(rows)])
        _copy(targets, parts)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Many copies by one call."""
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel()]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _by_name(bucket: Bucket, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    for spec, view in weights.views(bucket, flat):
        yield spec.name, view


def _is_spread(tensor: Tensor) -> bool:
    """Raises ValueError for a way of spreading that FSDP2 does not use here."""
    if not isinstance(tensor, DTensor) or num_shards(tensor) == 1:
        return False
    if tuple(tensor.placements) not in ((Shard(0),), (Replicate(), Shard(0))):
        raise ValueError(f"parameters must be spread by rows over a mesh's last dimension, not as {tensor.placements}")
    return True


def _slot(spec: ParameterSpec, size: int) -> ParameterSpec:
    """Room for the largest shard over `size` ranks."""
    return ParameterSpec(name=spec.name, shape=[-(-spec.shape[0] // size), *spec.shape[1:]], dtype=spec.dtype)
