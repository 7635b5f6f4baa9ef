"""A receiver of `bench.speed.publish`: the rollout service with a transformer alone, outside any fleet.

In a check, receiver 0 kills itself in the middle of its second update. A receiver that replaces it on its device begins
when it is dead.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.speed.publish.__main__ import TIMEOUT
from flowfleet.hardware import devices
from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import ModelFamily
from flowfleet.proto import rollout_pb2_grpc
from flowfleet.proto.rollout_pb2 import Bucket, ModelSpec
from flowfleet.rpc import endpoint as rpc
from flowfleet.weights import weights
from services.rollout.engines.diffusers import DiffusersEngine
from services.rollout.metrics import RolloutMetrics
from services.rollout.server import RolloutService
from services.trainer.parallel.sharding import allocate


class Engine(DiffusersEngine):
    """Only takes weights. `dies`: the process is killed in its second update."""

    def __init__(self, device: torch.device, store: TCPStore, *, dies: bool) -> None:
        super().__init__(device, max_batch=1)
        self._store = store
        self._dies = dies
        self._num_updates = 0

    def _adapter_of(self, model: ModelSpec, family: ModelFamily) -> ModelAdapter:
        adapter: ModelAdapter = family.load().load(
            model.path, dtype=weights.dtype_of(model.dtype), components=("transformer",), load_format="empty"
        )
        allocate(adapter.transformer, self.device)
        return adapter

    def _receive(self, member: weights.Member, buckets: Sequence[Bucket]) -> None:
        self._num_updates += 1
        dies = self._dies and self._num_updates == 2
        super()._receive(_Dying(member, len(buckets) // 2, self._store) if dies else member, buckets)


class _Dying:
    """A member whose process is killed after `num_buckets` have begun."""

    def __init__(self, member: weights.Member, num_buckets: int, store: TCPStore) -> None:
        self.device = member.device
        self._member, self._left, self._store = member, num_buckets, store

    def broadcast(self, flat: Tensor) -> weights.Pending:
        if self._left == 0:
            self._store.set("killed", str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return self._member.broadcast(flat)


class _NoFleet:
    """In place of a replica's entry in the fleet."""

    def changed(self) -> None: ...

    async def tell(self) -> None: ...


async def serve(options: argparse.Namespace, store: TCPStore) -> None:
    """Serves until the process is killed. The trainer reads its address in the store."""
    device = devices.pick_device(int(os.environ["LOCAL_RANK"]))
    engine = Engine(device, store, dies=options.check and options.number == 0)
    absent: Any = None  # what samples alone need
    fleet: Any = _NoFleet()
    service = RolloutService(
        engine,
        absent,
        absent,
        absent,
        RolloutMetrics(),
        fleet,
        replica_id=str(options.number),
        incarnation=uuid.uuid4().hex,
    )
    server = rpc.make_server()
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, server)

    async def tell(address: str) -> None:
        store.set(f"address/{options.number}", address)

    await rpc.serve(server, host="127.0.0.1", health=rpc.HealthState(), on_serving=tell)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--replaces", action="store_true", help="begins when receiver 0 is dead")
    parser.add_argument("--check", action="store_true")
    options, _ = parser.parse_known_args()
    store = TCPStore("127.0.0.1", options.port, timeout=TIMEOUT)
    if options.replaces:
        store.wait(["killed"])
    asyncio.run(serve(options, store))


if __name__ == "__main__":
    main()
