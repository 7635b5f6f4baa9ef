"""Checks that Redis still holds what its replicas acknowledged: no controller leads on a Redis that lost such writes.

The leader raises a number in Redis each second and waits until `num_acks` replicas have it. Redis replicates in order,
so they then have every write before it too. The leader notes the number in the state directory, which all controllers
share. A Redis that holds a smaller number than the noted one lost writes that were acknowledged: a failover promoted a
replica that lacks them, a backup was restored, or a disk was emptied. An operator who accepts the loss removes the
file.

Writes after the last noted number, of about the last second, may be lost without a refusal. Each job finds out by the
head of its ledger (ledger.py).
"""

import asyncio
import json
import logging
import os
import time
import uuid
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge
from redis.exceptions import RedisError

from flowfleet.redis import keys

log = logging.getLogger(__name__)

NAME = "redis-acknowledged.json"
PERIOD_S = 1.0
ACK_TIMEOUT_S = 1.0
_RAISE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return false end
if tonumber(redis.call('GET', KEYS[2]) or '0') < tonumber(ARGV[2]) then return false end
return redis.call('INCR', KEYS[2])
"""


class Replication:
    """`num_acks` 0: a single Redis, which is led whatever it holds."""

    def __init__(
        self, redis: Any, directory: Path = Path(), num_acks: int = 0, registry: CollectorRegistry | None = None
    ) -> None:
        self._redis = redis
        self._file = directory.resolve() / NAME
        self._num_acks = num_acks
        self.noted = 0
        """The number that replicas acknowledged, when this process last looked."""
        self.loss = ""
        """Says what Redis lost and what to do, while that keeps this process from leading."""
        text = "1 while no controller leads because Redis lost acknowledged writes"
        self._lost = Gauge("flowfleet_redis_lost_writes", text, registry=registry)
        text = "For how long --redis-acks replicas have not acknowledged what the leader writes"
        self._behind = Gauge("flowfleet_redis_unacknowledged_seconds", text, registry=registry)

    async def is_whole(self) -> bool:
        """True if Redis holds what was acknowledged; `loss` says what it lost."""
        if self._num_acks:
            loss = await self._look()
            if loss and loss != self.loss:
                log.critical("no controller leads: %s", loss)
            self.loss = loss
            self._lost.set(bool(loss))
        return not self.loss

    async def keep(self, term: str) -> None:
        """Raises the number while `term` leads. Returns when Redis lost writes or another controller leads."""
        if not self._num_acks:
            await asyncio.Event().wait()
        noted_at, warned = time.monotonic(), False
        try:
            while True:
                try:
                    if (acks := await self._raise(term)) is None:
                        return
                    cause = f"{acks} of {self._num_acks} replicas acknowledged" if acks < self._num_acks else ""
                except (RedisError, OSError) as error:
                    cause = str(error)
                if not cause:
                    noted_at = time.monotonic()
                elif not warned:
                    log.warning("a failover could lose Redis's newest writes: %s", cause)
                warned = bool(cause)
                self._behind.set(time.monotonic() - noted_at if cause else 0)
                await asyncio.sleep(PERIOD_S)
        finally:
            self._behind.set(0)

    async def _raise(self, term: str) -> int | None:
        """How many replicas acknowledged the next number, in time; None where it could not be raised."""
        self.noted = (await asyncio.to_thread(self._read)).get("number", 0)
        pipe = self._redis.pipeline(transaction=False)  # one connection: WAIT is for its own writes
        pipe.eval(_RAISE, 2, keys.leader_term(), keys.acknowledged(), term, self.noted)
        pipe.wait(self._num_acks, int(1000 * ACK_TIMEOUT_S))
        number, acks = await pipe.execute()
        if number is None:
            return None
        if acks >= self._num_acks:
            await asyncio.to_thread(self._note, number)
            self.noted = number
        return int(acks)

    async def _look(self) -> str:
        """Reads the file first: the number in Redis only grows meanwhile."""
        try:
            noted = await asyncio.to_thread(self._read)
        except OSError as error:
            return f"cannot tell whether Redis lost writes: {error}; repair the state directory"
        self.noted = noted.get("number", 0)
        found = int(await self._redis.get(keys.acknowledged()) or 0)
        if found >= self.noted:
            return ""
        return (
            f"Redis lost acknowledged writes: it is at number {found}, and its replicas had {self.noted} at "
            f"{noted.get('at', 'an unknown time')}; bring back the server or the backup that has them, or accept the "
            f"loss by removing {self._file}"
        )

    def _read(self) -> dict[str, Any]:
        """{} without a file. Raises OSError, for a damaged one too."""
        try:
            noted = json.loads(self._file.read_text(encoding="utf-8"))
            return {"number": int(noted["number"]), "at": str(noted["at"])}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError):
            raise OSError(f"{self._file} is damaged; remove it if Redis lost no writes") from None

    def _note(self, number: int) -> None:
        text = json.dumps({"number": number, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        aside = self._file.with_name(f".{NAME}.{uuid.uuid4().hex}")  # pids of two pods may be equal
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self._file)
