"""A replica's parts around its engine: the service on a gRPC server, and the replica's entry in the fleet."""

import asyncio
import logging
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis.asyncio

from flowfleet.data.blobs import open_blobs
from flowfleet.peers import Peers
from flowfleet.proto import rollout_pb2_grpc
from flowfleet.rpc.endpoint import HealthState
from services.rollout.engines.base import RolloutEngine
from services.rollout.metrics import RolloutMetrics
from services.rollout.registration import Membership
from services.rollout.sampling.media import MediaReader
from services.rollout.sampling.publisher import Publisher
from services.rollout.server import RolloutService

log = logging.getLogger(__name__)


class Replica:
    """`pool` encodes and decodes media; `on_replaced` is called when another process has taken this one's place."""

    def __init__(
        self,
        engine: RolloutEngine,
        client: redis.asyncio.Redis,
        pool: ThreadPoolExecutor,
        server: Any,
        health: HealthState,
        peers: Peers,
        *,
        replica_id: str,
        incarnation: str | None = None,
        on_replaced: Callable[[], None],
    ) -> None:
        """Adds RolloutService to a server that has not started."""
        blobs = open_blobs(client)
        self._membership = Membership(client, engine, health, on_replaced=on_replaced)
        self._service = RolloutService(
            engine,
            Publisher(client, blobs, replica_id, pool),
            MediaReader(blobs, pool),
            blobs,
            RolloutMetrics(),
            self._membership,
            peers,
            replica_id=replica_id,
            incarnation=incarnation or uuid.uuid4().hex,
        )
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self._service, server)

    async def join(self, address: str, model: str, pool: str) -> None:
        """Joins the fleet as a replica of `pool` that is reached at `address`. `model`: loaded beforehand, if any."""
        await self._membership.join(lambda: self._service.record(address, model, pool))

    async def leave(self, drain_s: float) -> None:
        """Leaves the fleet and gives running samples `drain_s`."""
        unfinished, _ = await asyncio.gather(self._service.drain(drain_s), self._membership.leave())
        if unfinished:
            log.warning("%d samples were still running after %.0f s", unfinished, drain_s)
        self._service.close()
