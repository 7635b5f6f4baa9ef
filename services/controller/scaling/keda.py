"""KEDA's external push scaler, served by every controller: how many replicas a rollout pool or a reward should have.

A trigger names what it scales: `component: rollout` or `reward`, and `name`. The metric is the number of replicas that
are wanted, with a target of 1 each, so the autoscaler asks for exactly that many. Answers are the leader's (demand.py);
while there is none, what was wanted last still is, and an admitted job wants one replica at least.

What cannot be known is an error, never "no work": KEDA leaves the replicas as they are when a scaler fails. It sends no
token, so this port only tells demand. A stream ends by itself now and then, for KEDA waits longer after each one that
broke, and forgets that only when one ends well.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

from redis.exceptions import RedisError

from flowfleet.errors import InvalidRequest, NotFound, Unavailable
from flowfleet.process.service import format_address
from flowfleet.proto import externalscaler_pb2 as pb
from flowfleet.proto import externalscaler_pb2_grpc
from flowfleet.rpc import endpoint as rpc
from services.controller.concurrency import end, wait
from services.controller.fleet.directory import Directory
from services.controller.scaling.demand import Component, DemandHash, Name, at_least
from services.controller.store.changes import listen
from services.controller.store.store import Store

log = logging.getLogger(__name__)

METRIC = "replicas"
TARGET = 1
LOOK_S = 1.0
STREAM_S = 600.0


class Scaler(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Answers for what the directory knows, and for whatever a job needs."""

    def __init__(self, redis: Any, store: Store, directory: Directory, *, stream_s: float = STREAM_S) -> None:
        self._redis = redis
        self._store = store
        self._hash = DemandHash(redis)
        self._directory = directory
        self._stream_s = stream_s
        self._looks: set[asyncio.Event] = set()
        self._closing = False
        self._listener: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._listener = asyncio.create_task(listen(self._redis, self._look), name="changes of demand")

    async def stop(self) -> None:
        """Streams end, and well."""
        self._closing = True
        self._look()
        if self._listener is not None:
            await end([self._listener])

    async def IsActive(self, request: pb.ScaledObjectRef, context: Any) -> pb.IsActiveResponse:
        return pb.IsActiveResponse(result=await self._replicas(_name(request)) > 0)

    async def StreamIsActive(self, request: pb.ScaledObjectRef, context: Any) -> AsyncIterator[pb.IsActiveResponse]:
        """Now, and at each change. An outage of Redis is waited for."""
        name = _name(request)
        until = time.monotonic() + self._stream_s
        told: bool | None = None
        look = asyncio.Event()
        self._looks.add(look)
        try:
            while not self._closing and time.monotonic() < until:
                look.clear()
                try:
                    active = await self._replicas(name) > 0
                except Unavailable as error:
                    log.warning("%s", error)
                else:
                    if active != told:
                        yield pb.IsActiveResponse(result=active)
                    told = active
                await wait(look, LOOK_S)
        finally:
            self._looks.discard(look)

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Any) -> pb.GetMetricSpecResponse:
        _name(request)
        spec = pb.MetricSpec(metricName=METRIC, targetSize=TARGET, targetSizeFloat=TARGET)
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        replicas = await self._replicas(_name(request.scaledObjectRef))
        value = pb.MetricValue(metricName=METRIC, metricValue=replicas, metricValueFloat=replicas)
        return pb.GetMetricsResponse(metricValues=[value])

    async def _replicas(self, name: Name) -> int:
        """Raises NotFound for unknown names that no job needs, Unavailable without Redis."""
        try:
            wanted, fresh = await self._hash.read()
            least = {} if fresh else at_least(await self._store.jobs.unended())
        except RedisError as error:
            raise Unavailable(f"Redis does not answer: {error}") from None
        found = [demands[name].replicas for demands in (wanted, least) if name in demands]
        if not found and not self._knows(*name):
            raise NotFound(f"the fleet has no {name[0]} {name[1]!r}: correct the trigger's metadata")
        return max(found, default=0)

    def _knows(self, component: Component, name: str) -> bool:
        if component == "reward":
            return name in self._directory.rewards
        return self._directory.pools is None or name in self._directory.pools

    def _look(self) -> None:
        for look in self._looks:
            look.set()


def _name(request: pb.ScaledObjectRef) -> Name:
    """Raises InvalidRequest."""
    metadata = request.scalerMetadata
    component, name = metadata.get("component", ""), metadata.get("name", "")
    if component not in get_args(Component) or not name:
        raise InvalidRequest(
            f"ScaledObject {request.namespace}/{request.name}: set component to one of "
            f"{', '.join(get_args(Component))} and name to a pool's or a reward's in the trigger's metadata"
        )
    return component, name  # type: ignore[return-value]


@asynccontextmanager
async def serve_scaler(scaler: Scaler, host: str, port: int) -> AsyncIterator[str]:
    """Gives host:port. Raises Unavailable when the port is taken."""
    server = rpc.make_server(guarded=False)
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(scaler, server)
    address = format_address(host, rpc.listen(server, host, port, guarded=False))
    await scaler.start()
    await server.start()
    log.info("serving the external scaler on %s", address)
    try:
        yield address
    finally:
        await scaler.stop()
        await server.stop(1.0)
