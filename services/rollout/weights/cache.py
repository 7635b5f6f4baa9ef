"""Adapters in host memory, as the blob store had them; those used longest ago are dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor

from flowfleet.data.blobs import BlobStore
from flowfleet.data.replicas import VANISHED
from flowfleet.errors import Conflict, DataLoss, NotFound
from flowfleet.proto.common_pb2 import BlobRef
from flowfleet.weights.lora import adapter_from_bytes
from services.rollout.weights.slots import Key

MAX_BYTES = 8 * 2**30


class AdapterCache:
    """Holds the newest adapters, at most `max_bytes` of them, but always the last one."""

    def __init__(self, blobs: BlobStore, max_bytes: int = MAX_BYTES) -> None:
        self._blobs, self._max_bytes = blobs, max_bytes
        self._held: OrderedDict[Key, Mapping[str, Tensor]] = OrderedDict()

    async def get(self, key: Key, blob: BlobRef) -> Mapping[str, Tensor]:
        """Raises Conflict for a blob that is gone or torn."""
        if key not in self._held:
            try:
                self._held[key] = adapter_from_bytes(await self._blobs.get(blob))
            except (NotFound, DataLoss) as error:
                raise Conflict(f"{VANISHED} of version {key.version}: publish it again ({error})") from None
        self._held.move_to_end(key)
        while len(self._held) > 1 and sum(map(_size, self._held.values())) > self._max_bytes:
            self._held.popitem(last=False)
        return self._held[key]

    def forget(self, key: Key) -> None:
        self._held.pop(key, None)


def _size(state: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in state.values())
