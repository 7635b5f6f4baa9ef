"""A replica's entry in the fleet: a Redis key that expires unless renewed, so that a dead replica leaves by itself."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import asdict, dataclass

import redis
import redis.asyncio

from flowfleet import keys
from flowfleet.rpc import HealthState
from services.rollout.engines.base import RolloutEngine

EXPIRES_S = 15
RENEW_EVERY_S = 3.0
_REMOVE_DEADLINE_S = 3.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    replica_id: str
    address: str
    """host:port at which the fleet reaches its RolloutService."""
    incarnation: str
    """New at every process start."""
    model: str
    """Preloaded model, empty for none."""
    pool: str
    """Rollout pool; a job samples on the replicas of one."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class Membership:
    """Joins and leaves the fleet. In between it is alive while the engine makes progress, and serves while the fleet
    can find it as well. A Redis that is away ends no process."""

    def __init__(
        self, client: redis.asyncio.Redis, engine: RolloutEngine, health: HealthState, *, stall_s: float
    ) -> None:
        self._redis = client
        self._engine = engine
        self._health = health
        self._stall_s = stall_s
        self._record: ReplicaRecord | None = None
        self._task: asyncio.Task[None] | None = None

    async def join(self, record: ReplicaRecord) -> None:
        """Registers, then renews from a task until `leave`."""
        self._record = record
        await self._renew(record)
        self._task = asyncio.create_task(self._keep(record), name="membership")

    async def leave(self) -> None:
        """If Redis cannot be reached now, the entry expires by itself."""
        await self._stop()
        if self._record is None:
            return
        try:
            await asyncio.wait_for(self._delete(self._record), _REMOVE_DEADLINE_S)
        except (TimeoutError, redis.RedisError) as error:
            log.warning("the registration could not be removed and expires in %d s: %s", EXPIRES_S, error)

    async def _keep(self, record: ReplicaRecord) -> None:
        """A Redis that is away for longer than its client retries must not end the heartbeat."""
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            is_alive = self._engine.stalled_s() < self._stall_s
            await self._health.set_alive(is_alive)
            await self._health.set_serving(is_alive and await self._renewed(record))

    async def _renewed(self, record: ReplicaRecord) -> bool:
        try:
            await self._renew(record)
        except redis.RedisError as error:
            log.warning("the registration could not be renewed: %s", error)
            return False
        return True

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _renew(self, record: ReplicaRecord) -> None:
        await self._redis.set(keys.replica(record.replica_id), record.to_json(), ex=EXPIRES_S)

    async def _delete(self, record: ReplicaRecord) -> None:
        """A successor under the same id may have registered already: its entry stays."""
        key = keys.replica(record.replica_id)
        if await self._redis.get(key) == record.to_json().encode():
            await self._redis.delete(key)
