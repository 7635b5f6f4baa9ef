"""The store's way to Redis: its client, its clock, and transactions that only the controller that leads may make."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from flowfleet.redis import keys
from services.controller.store.leadership import Lease

T = TypeVar("T")

Pipe = Any
"""A redis.asyncio Pipeline. redis-py's hints do not know that replies are bytes here, so they are not used."""


@dataclass(frozen=True)
class Link:
    """`redis` decodes no responses; `clock` stands for Redis's. With a lease, transactions raise LeaseLost once another
    controller leads."""

    redis: Any
    clock: Callable[[], float] | None = None
    lease: Lease | None = None

    async def now(self) -> float:
        """Seconds since the epoch by Redis, whose clock is the same for all controllers and all that is stored."""
        if self.clock is not None:
            return self.clock()
        seconds, microseconds = await self.redis.time()
        return float(seconds) + 1e-6 * float(microseconds)

    async def transaction(self, attempt: Callable[[Pipe], Awaitable[Any]], watched: str) -> Any:
        """Runs `Redis.transaction` with `attempt`, whose value it returns."""
        if self.lease is not None:
            return await self.lease.transaction(attempt, watched)
        return await self.redis.transaction(attempt, watched, value_from_callable=True)

    async def each(self, items: Iterable[T], ask: Callable[[Pipe, T], object]) -> list[Any]:
        """Replies to one command an item, in one round trip."""
        async with self.redis.pipeline(transaction=False) as pipe:
            for item in items:
                ask(pipe, item)
            return list(await pipe.execute())

    async def write(self, fill: Callable[[Pipe], Any]) -> None:
        """Runs a transaction that reads nothing."""

        async def attempt(pipe: Pipe) -> None:
            pipe.multi()
            fill(pipe)

        await self.transaction(attempt, keys.leader_term())


class Linked:
    """A part of the store."""

    def __init__(self, link: Link) -> None:
        self._link, self._redis = link, link.redis
