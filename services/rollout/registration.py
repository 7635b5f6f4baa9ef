"""A replica's entry in the fleet: renewed while its engine works and written whenever it changes. It expires soon
after its replica."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import redis
import redis.asyncio

from flowfleet.data.replicas import EXPIRES_S, RENEW_EVERY_S, ReplicaDirectory, ReplicaRecord
from flowfleet.rpc.endpoint import HealthState
from services.rollout.engines.base import RolloutEngine

_DEADLINE_S = 3.0

log = logging.getLogger(__name__)


class Membership:
    """Joins and leaves the fleet. In between, entry and health stay while the engine makes progress.

    An unreachable Redis does not affect health: a restart would not cure it.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        engine: RolloutEngine,
        health: HealthState,
        on_replaced: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_replaced` is called when another process has taken this one's place: it must end."""
        self._on_replaced = on_replaced
        self._directory = ReplicaDirectory(client)
        self._engine = engine
        self._health = health
        self._record: Callable[[], ReplicaRecord] | None = None
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def join(self, record: Callable[[], ReplicaRecord]) -> None:
        """Registers, then keeps the entry from a task until `leave`. `record` tells what it says now."""
        self._record = record
        await self._write(record, joins=True)
        self._task = asyncio.create_task(self._keep(record), name="membership")

    async def leave(self) -> None:
        """If Redis cannot be reached now, the entry expires by itself."""
        await self._stop()
        if self._record is None:
            return
        try:
            await asyncio.wait_for(self._directory.remove(self._record()), _DEADLINE_S)
        except (TimeoutError, redis.RedisError) as error:
            log.warning("could not remove the registration, it expires in %.0f s: %s", EXPIRES_S, error)

    def changed(self) -> None:
        """The record says something else: it is written soon."""
        self._changed.set()

    async def tell(self) -> None:
        """Writes the record before it returns, so that the next reader sees it, unless Redis is unreachable."""
        if self._task is not None and not self._engine.is_stuck:
            with suppress(TimeoutError, redis.RedisError):
                await asyncio.wait_for(self._write(self._record), _DEADLINE_S)

    async def _keep(self, record: Callable[[], ReplicaRecord]) -> None:
        """Keeps the heartbeat running if Redis is unreachable for longer than its client retries."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_EVERY_S):
                    await self._changed.wait()
            self._changed.clear()
            is_alive = not self._engine.is_stuck
            await self._health.set_serving(is_alive)
            try:
                if is_alive:
                    await self._write(record)
            except redis.RedisError as error:
                log.warning("could not renew the registration: %s", error)

    async def _write(self, record: Callable[[], ReplicaRecord] | None, *, joins: bool = False) -> None:
        """Writes the record, one write at a time, so that an older record never replaces a newer one."""
        assert record is not None
        async with self._writing:
            is_ours = await self._directory.put(record(), joins=joins)
        if not is_ours:
            log.error("another process registered as replica %s; this one exits", record().replica_id)
            self._on_replaced()

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
