"""The rollout replicas as the controller knows them: a pure registry, and a thin watcher that keeps it true.

A replica announces itself in Redis and is asked for its status by gRPC. It is given a prompt only if it serves a
verified, admissible version of the job (invariant 4). Among those the one with the fewest outstanding samples is
chosen, and a request (whole groups) stays on its replica.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import grpc
from redis.asyncio import Redis
from redis.exceptions import RedisError

from flowfleet import keys
from flowfleet.proto import rollout_pb2, rollout_pb2_grpc
from flowfleet.rpc import open_channel
from services.controller.concurrency import end

log = logging.getLogger(__name__)

STATUS_DEADLINE_S = 3.0
MISSED_POLLS = 3


class Health(StrEnum):
    """Of a replica, as the controller sees it."""

    UNKNOWN = "unknown"  # announced, not asked yet
    IDLE = "idle"  # alive without verified weights
    SERVING = "serving"  # takes prompts of its job and version
    UPDATING = "updating"  # weights in flight
    DRAINING = "draining"  # finishes its work and takes no more
    LOST = "lost"  # did not answer several times


_HEALTH = {
    rollout_pb2.ROLLOUT_STATE_IDLE: Health.IDLE,
    rollout_pb2.ROLLOUT_STATE_SERVING: Health.SERVING,
    rollout_pb2.ROLLOUT_STATE_UPDATING: Health.UPDATING,
    rollout_pb2.ROLLOUT_STATE_DRAINING: Health.DRAINING,
}


@dataclass(frozen=True)
class Replica:
    """One rollout process. `outstanding` counts samples that this controller asked for and did not get yet."""

    replica_id: str
    address: str
    pool: str = "default"
    incarnation: str = ""
    health: Health = Health.UNKNOWN
    job_id: str = ""
    version: int | None = None
    digest: str = ""
    outstanding: int = 0
    samples_total: int = 0
    device: str = ""
    device_id: str = ""
    """Of the accelerator, the same in every process; empty on the CPU."""
    missed: int = 0

    def serves(self, job_id: str, low: int, high: int) -> bool:
        ready = self.health is Health.SERVING and self.job_id == job_id
        return ready and self.version is not None and low <= self.version <= high

    @property
    def live(self) -> bool:
        return self.health in (Health.IDLE, Health.SERVING, Health.UPDATING)


class Announced(NamedTuple):
    """Where a replica says that it is."""

    address: str
    """host:port."""
    pool: str


class Fleet:
    """Pure registry: announcements and statuses in, choices out."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}

    def announce(self, announced: Mapping[str, Announced]) -> None:
        """Sets the membership, by replica id. Who left is forgotten."""
        self._replicas = {
            replica_id: known
            if (known := self._replicas.get(replica_id)) is not None and (known.address, known.pool) == where
            else Replica(replica_id, *where)
            for replica_id, where in announced.items()
        }

    def answered(self, replica_id: str, status: rollout_pb2.RolloutStatus) -> None:
        known = self._replicas.get(replica_id)
        if known is None:
            return
        health = _HEALTH.get(status.state, Health.UNKNOWN)
        self._replicas[replica_id] = replace(
            known,
            incarnation=status.incarnation,
            health=health,
            job_id=status.job_id,
            version=status.policy_version if health is Health.SERVING else None,
            digest=status.weights_digest,
            samples_total=status.samples_total,
            device=status.device,
            device_id=status.device_id,
            missed=0,
        )

    def missed(self, replica_id: str, *, lost: bool = False) -> None:
        """An unanswered status, or (`lost`) a call that broke: no prompt until it answers again."""
        known = self._replicas.get(replica_id)
        if known is not None:
            missed = known.missed + 1
            gone = lost or missed >= MISSED_POLLS
            self._replicas[replica_id] = replace(known, missed=missed, health=Health.LOST if gone else known.health)

    def charge(self, replica_id: str, samples: int) -> None:
        """Adds to what is outstanding; negative when done."""
        known = self._replicas.get(replica_id)
        if known is not None:
            self._replicas[replica_id] = replace(known, outstanding=max(0, known.outstanding + samples))

    def choose(self, job_id: str, low: int, high: int, limit: int) -> Replica | None:
        """The least loaded replica that serves a version in low … high and has less than `limit` samples
        outstanding."""
        able = [r for r in self._replicas.values() if r.serves(job_id, low, high) and r.outstanding < limit]
        return min(able, key=lambda r: (r.outstanding, -(r.version or 0), r.replica_id), default=None)

    def behind(self, pool: str, job_id: str, version: int) -> list[Replica]:
        """Live replicas of a pool that settled on something else than this version of this job."""
        settled = (Health.IDLE, Health.SERVING)
        return [r for r in self.live(pool) if r.health in settled and not r.serves(job_id, version, version)]

    def num_devices(self, job_id: str) -> int:
        """Accelerators that live replicas of a job run on; on CPUs, processes."""
        return len({r.device_id or r.replica_id for r in self._replicas.values() if r.live and r.job_id == job_id})

    def live(self, pool: str) -> list[Replica]:
        """Of a pool, by name."""
        of_pool = (r for r in self._replicas.values() if r.live and r.pool == pool)
        return sorted(of_pool, key=lambda r: r.replica_id)

    def all(self) -> list[Replica]:
        return sorted(self._replicas.values(), key=lambda r: r.replica_id)


class FleetWatch:
    """Keeps a `Fleet` true and lends replicas out."""

    def __init__(self, redis: Redis, *, poll_s: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        self.fleet = Fleet()
        self._redis = redis
        self._poll_s = poll_s
        self._clock = clock
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._leases: Counter[str] = Counter()
        self._changed = asyncio.Condition()
        self._looking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(self._watch(), name="fleet-watch")

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    async def stop(self) -> None:
        if self._task is not None:
            await end([self._task])
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))

    async def refresh(self) -> None:
        """One look at announcements and statuses."""
        async with self._looking:
            self.fleet.announce(await self._announced())
            await asyncio.gather(*(self._ask(replica) for replica in self.fleet.all()))
            await self._close_unused()
        async with self._changed:
            self._changed.notify_all()

    def stub(self, address: str) -> rollout_pb2_grpc.RolloutServiceAsyncStub:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return rollout_pb2_grpc.RolloutServiceStub(self._channels[address])

    @asynccontextmanager
    async def lease(self, job_id: str, low: int, high: int, samples: int, limit: int) -> AsyncIterator[Replica]:
        """Waits for a replica at an admissible version, charges it with `samples`, and frees it at the end."""
        async with self._changed:
            while (replica := self.fleet.choose(job_id, low, high, limit)) is None:
                await self._changed.wait()
            self.fleet.charge(replica.replica_id, samples)
        self._leases[replica.address] += 1
        try:
            yield replica
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self.fleet.missed(replica.replica_id, lost=True)
            raise
        finally:
            self._leases[replica.address] -= 1
            self.fleet.charge(replica.replica_id, -samples)
            async with self._changed:
                self._changed.notify_all()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.refresh()
            except RedisError as error:
                log.warning("no list of replicas: %s", error)

    async def _announced(self) -> dict[str, Announced]:
        names = [key async for key in self._redis.scan_iter(match=keys.replica_pattern(), count=1000)]
        values: Any = await self._redis.mget(names) if names else []
        records = [json.loads(value) for value in values if value]
        return {record["replica_id"]: Announced(record["address"], record["pool"]) for record in records}

    async def _ask(self, replica: Replica) -> None:
        request = rollout_pb2.GetRolloutStatusRequest()
        try:
            status = await self.stub(replica.address).GetStatus(request, timeout=STATUS_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.info("replica %s: no status: %s", replica.replica_id, error.code().name)
            self.fleet.missed(replica.replica_id)
        else:
            self.fleet.answered(replica.replica_id, status)

    async def _close_unused(self) -> None:
        """A replica that drains has left the registry and still finishes what it was asked."""
        used = {replica.address for replica in self.fleet.all()}
        for address in [known for known in self._channels if known not in used and not self._leases[known]]:
            await self._channels.pop(address).close(None)
