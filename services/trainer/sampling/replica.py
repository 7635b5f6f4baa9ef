"""A rank's membership in the fleet: a gRPC server of its own, from the job's first configuration to the end."""

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flowfleet.data.replicas import rank_id
from flowfleet.peers import Peers
from flowfleet.process.service import format_address
from flowfleet.redis import client as redis_client
from flowfleet.rpc import endpoint as rpc
from services.rollout.replica import Replica
from services.trainer.sampling.engine import SharingEngine
from services.trainer.worker import Job, Worker

SERVICE = "flowfleet.v1.RolloutService"
_MEDIA_THREADS = 4

log = logging.getLogger(__name__)


class RankReplica:
    """Lives on `loop`, from the first call of `joins` with a job whose trainer samples."""

    def __init__(
        self,
        worker: Worker,
        loop: asyncio.AbstractEventLoop,
        *,
        host: str,
        reached_at: str,
        first_port: int,
        on_replaced: Callable[[], None],
    ) -> None:
        """`reached_at` is the host at which the fleet reaches this rank. The ranks of a machine take the ports from
        `first_port` on; 0 takes free ones."""
        self._worker, self._loop = worker, loop
        self._host, self._reached_at = host, reached_at
        self._port = first_port + int(os.environ.get("LOCAL_RANK", "0")) if first_port else 0
        self._on_replaced = on_replaced
        self._replica: Replica | None = None
        self._server: Any = None
        """Kept because gRPC stops a server that is garbage-collected."""

    def joins(self, job: Job) -> None:
        """Waits until the fleet knows this rank. Not to be called on the loop's own thread."""
        if job.spec.trainer.samples != "no" and self._replica is None:
            asyncio.run_coroutine_threadsafe(self._join(job), self._loop).result()

    def leaves(self) -> None:
        """Leaves the fleet at once. Not to be called on the loop's own thread."""
        asyncio.run_coroutine_threadsafe(self.leave(0.0), self._loop).result()

    async def leave(self, drain_s: float) -> None:
        """Leaves the fleet; samples that still run are given up after `drain_s`."""
        if self._replica is not None:
            await self._replica.leave(drain_s)
            await self._server.stop(None)

    async def _join(self, job: Job) -> None:
        client = redis_client.connect(redis_client.redis_url())
        engine = SharingEngine(job.engine, self._worker.turns, self._worker.shared_adapter)
        server, health = rpc.make_server(), rpc.HealthState(SERVICE)
        rank, pool = self._worker.ranks.rank, ThreadPoolExecutor(_MEDIA_THREADS, "media")
        name = rank_id(job.job_id, rank)
        end = self._on_replaced
        replica = Replica(engine, client, pool, server, health, Peers(client), replica_id=name, on_replaced=end)
        await health.register(server)
        port = rpc.listen(server, self._host, self._port)
        await server.start()
        await replica.join(format_address(self._reached_at, port), job.spec.model.path, job.spec.trainer_pool)
        await health.set_serving(True)
        self._replica, self._server = replica, server
        log.info("rank %d samples on port %d", rank, port, extra={"job": job.job_id})
