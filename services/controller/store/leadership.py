"""Which of several controllers runs jobs: a lease in Redis, and a fence around what only its holder may write.

    lease   keys.leader()         who leads, expires after `ttl_s` unless renewed
    term    keys.leader_term()    a token of the last one that took the lease; never expires
    number  keys.acknowledged()   how far the replicas of Redis had come (replication.py)

The lease decides who works, the term decides whose writes count. A controller that was suspended and wakes after
another one took over still believes that it leads, but the term is not its own any more, and `Lease.transaction` checks
that in the transaction itself. It also checks the number, which is smaller where Redis lost acknowledged writes. A
lease that expired while Redis was unreachable is taken back unless another controller took it.
"""

import asyncio
import json
import logging
import os
import socket
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge
from redis.exceptions import RedisError

from flowfleet.redis import keys
from flowfleet.redis.trouble import trouble
from services.controller.concurrency import end
from services.controller.store.replication import Replication

log = logging.getLogger(__name__)

TTL_S = 10.0
RENEW_S = 3.0
TRY_S = 0.5
"""How often a follower tries. A lease that is given back is taken within that."""

_TAKE = """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] and held ~= ARGV[4] then return held end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('SET', KEYS[2], ARGV[2])
return false
"""
_RENEW = """
if redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
return 1
"""
_GIVE_BACK = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


class LeaseLost(Exception):
    """Another controller leads, or none may. Not a FlowfleetError: a command that meets it is not retried, its
    driver ends."""


class Lease:
    """The right of one process at a time to run jobs. `redis` decodes no responses."""

    def __init__(
        self,
        redis: Any,
        registry: CollectorRegistry | None = None,
        replication: Replication | None = None,
        *,
        ttl_s: float = TTL_S,
        renew_s: float = RENEW_S,
        try_s: float = TRY_S,
    ) -> None:
        self._redis = redis
        self._replication = replication or Replication(redis)
        self._ttl_ms = int(1000 * ttl_s)
        self._renew_s = renew_s
        self._try_s = try_s
        self._keys = keys.leader(), keys.leader_term()
        self._term = ""
        self._holder = ""
        self.held = False
        """True while the lease is held, as far as this process knows. Only `transaction` and `confirm` are sure."""
        self._refusal = ""
        self._gauge = Gauge("flowfleet_controller_leader", "1 on the controller that runs jobs", registry=registry)

    @property
    def trouble(self) -> str:
        """Why Redis refused the last write of this lease, which every controller tries every few seconds, or what it
        lost."""
        return self._replication.loss or self._refusal

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Waits for the lease, works while it is held, and so on until cancelled; then gives it back. An error of
        `work` is raised, but for LeaseLost."""
        while True:
            await self._take()
            parts = work(), self._renew(), self._replication.keep(self._term)
            tasks = [asyncio.ensure_future(part) for part in parts]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                try:
                    await end(tasks)
                finally:
                    self._set_held(False)
                    await self._give_back()
            for task in tasks:
                if not task.cancelled() and (error := task.exception()) and not isinstance(error, LeaseLost):
                    raise error
            log.warning("lost the leader's lease")

    async def until_writable(self) -> None:
        """Waits while Redis refuses this lease's writes."""
        while self.trouble:
            await asyncio.sleep(self._try_s)

    async def confirm(self) -> None:
        """Asks Redis. Raises LeaseLost."""
        await self._check(self._redis)

    async def transaction(self, fill: Callable[[Any], Awaitable[Any]], *watched: str) -> Any:
        """Runs `Redis.transaction` while this controller leads: `fill` gets a pipeline that watches keys, reads, calls
        `multi()`, adds commands, and may run again. Raises LeaseLost, with nothing written, if another controller has
        led since or Redis lost acknowledged writes."""

        async def attempt(pipe: Any) -> Any:
            await self._check(pipe)
            return await fill(pipe)

        return await self._redis.transaction(attempt, keys.leader_term(), *watched, value_from_callable=True)

    async def _check(self, redis: Any) -> None:
        term, number = await redis.mget(keys.leader_term(), keys.acknowledged())
        if term != self._term.encode() or int(number or 0) < self._replication.noted:
            raise LeaseLost

    async def _take(self) -> None:
        self._term = uuid.uuid4().hex
        self._holder = json.dumps({**_this_process(), "term": self._term})
        dead = ""
        while True:
            try:
                held = b""
                if await self._replication.is_whole():
                    held = await self._call(_TAKE, self._holder, self._term, self._ttl_ms, dead)
            except RedisError as error:
                log.warning("no controller can lead: %s", self.trouble or error)
                held = b""
            if held is None:
                break
            dead = held.decode() if _is_dead(held) else ""
            if not dead:
                await asyncio.sleep(self._try_s)
        self._set_held(True)
        log.info("became leader")

    async def _renew(self) -> None:
        """Returns when another controller took over."""
        while True:
            await asyncio.sleep(self._renew_s)
            try:
                if not await self._call(_RENEW, self._holder, self._term, self._ttl_ms):
                    return
            except RedisError as error:  # no other controller can take it either
                log.warning("could not renew the lease: %s", self.trouble or error)

    async def _give_back(self) -> None:
        try:
            await self._call(_GIVE_BACK, self._holder)
        except RedisError as error:
            log.warning("could not release the lease, it will expire: %s", error)

    async def _call(self, script: str, *arguments: str | int) -> Any:
        try:
            answer = await self._redis.eval(script, 2, *self._keys, *arguments)
        except RedisError as error:
            self._refusal = trouble(error) or ""
            raise
        self._refusal = ""
        return answer

    def _set_held(self, held: bool) -> None:
        self.held = held
        self._gauge.set(held)


def _this_process() -> dict[str, str | int]:
    """Tells this process from all others: the machine's boot, the namespace of its pid, and when it started."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "place": _place(), "pid": pid, "started": _started(pid)}


def _is_dead(holder: bytes) -> bool:
    """True if the holder was a process that we would see and do not: a predecessor that was killed."""
    who = json.loads(holder or b"{}")
    return bool(_place()) and who.get("place") == _place() and who["started"] != _started(who["pid"])


def _place() -> str:
    """Id of the namespace in which pids are valid; "" if it cannot be determined."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Kernel ticks since boot; "" once it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
