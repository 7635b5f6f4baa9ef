"""Keeps a job that stops the controller from stopping it for all jobs: notices which job's driver blocks the event
loop, or was being opened when a controller died, and counts that as a strike. A job with several strikes is
quarantined: no controller drives it until its user resumes it.

    driving   keys.driving()      job → what is suspected of it now; a field that outlives its controller is a strike
    strikes   keys.strikes(job)   strikes in their order; they expire an hour after the last one

A controller is also killed by others while it opens a job. That a job was opened to the end clears it of such strikes,
and a job that has one is opened alone: only what dies again and again by itself is quarantined.

A thread watches the event loop, for a loop that is held tells nothing itself. It writes only while a driver holds the
loop, so a healthy job costs two writes when it is taken up. A loop that is held for too long ends the process: its
supervisor starts another one, which finds the field.
"""

import asyncio
import contextvars
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from redis.exceptions import RedisError

from flowfleet.redis import keys
from flowfleet.redis.client import connect_sync

log = logging.getLogger(__name__)

LOOK_S = 0.25
MARK_S = 1.0
"""A driver that holds the loop for so long is written down: the process may die of it."""
STRIKE_S = 10.0
"""Holding it for so long is a strike though the process lives."""
END_S = 60.0
"""The process ends itself then."""
STRIKES = 3
WITHIN_S = 3600
_DIED = "the controller died while it opened the job"

_DRIVEN = contextvars.ContextVar("driven", default="")
_job_of: weakref.WeakKeyDictionary[asyncio.Future[Any], str] = weakref.WeakKeyDictionary()


class Quarantine:
    """Quarantine of one controller."""

    def __init__(self, redis: Any, redis_url: str) -> None:
        self._redis, self._url = redis, redis_url
        self._alone = asyncio.Lock()
        self._ended = threading.Event()
        self._beating: asyncio.Task[None] | None = None
        self._beats = 0
        self._struck: set[str] = set()
        """Jobs with a strike that is not judged yet."""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(_noting)
        self._beating = loop.create_task(self._beat(), name="beat of the event loop")
        threading.Thread(target=self._watch, args=[loop], name="quarantine", daemon=True).start()

    async def stop(self) -> None:
        self._ended.set()
        if self._beating is not None:
            self._beating.cancel()

    @asynccontextmanager
    async def opening(self, job_id: str) -> AsyncIterator[None]:
        """Suspects a job of what happens to the process meanwhile, until it is opened."""
        struck = await self._redis.exists(keys.strikes(job_id))
        async with self._alone if struck else nullcontext():
            await self._redis.hset(keys.driving(), job_id, _suspicion(_DIED))
            try:
                yield
            finally:
                await self._redis.hdel(keys.driving(), job_id)
        for strike in await self._redis.zrange(keys.strikes(job_id), 0, -1):
            if json.loads(strike)[1] == _DIED:
                await self._redis.zrem(keys.strikes(job_id), strike)

    @staticmethod
    def drive(job_id: str) -> None:
        """Marks this task, and all that it starts from now on, as the job's."""
        _DRIVEN.set(job_id)
        if (task := asyncio.current_task()) is not None:
            _job_of[task] = job_id

    async def take_over(self) -> None:
        """Counts what was suspected by controllers that are no more."""
        for job_id, suspicion in (await self._redis.hgetall(keys.driving())).items():
            strikes = keys.strikes(job_id.decode())
            count = await self._redis.zcard(strikes)
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.zadd(strikes, {suspicion: count}).expire(strikes, WITHIN_S)
                pipe.hdel(keys.driving(), job_id)
                await pipe.execute()
            self._struck.add(job_id.decode())
            log.error("job got a strike: %s", json.loads(suspicion)[1], extra={"job": job_id.decode()})

    def suspects(self) -> list[str]:
        """Jobs that have had a strike since the last call."""
        struck, self._struck = self._struck, set()
        return sorted(struck)

    async def reason(self, job_id: str) -> str:
        """Why the job must not be driven any more; empty while it may be."""
        strikes = await self._redis.zrange(keys.strikes(job_id), 0, -1)
        if len(strikes) < STRIKES:
            return ""
        why = json.loads(strikes[-1])[1]
        return (
            f"in quarantine: it stopped the controller {len(strikes)} times, each within an hour of the one before, "
            f"last: {why}. The controller's log has more. Make the job smaller, or resume it to try once more"
        )

    async def forgive(self, job_id: str) -> None:
        await self._redis.delete(keys.strikes(job_id))

    async def _beat(self) -> None:
        while True:
            self._beats += 1
            await asyncio.sleep(LOOK_S)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread. A process that was suspended has not looked meanwhile, so that time does not count."""
        redis = connect_sync(self._url)
        seen, held, looked, marked = 0, 0.0, time.monotonic(), ("", "")
        while not self._ended.wait(LOOK_S):
            now = time.monotonic()
            beats, elapsed, looked = self._beats, min(now - looked, 2 * LOOK_S), now
            if beats != seen:
                self._judge(redis, marked, held)
                seen, held, marked = beats, 0.0, ("", "")
                continue
            held += elapsed
            if held > MARK_S and not marked[0] and (job_id := _holder(loop)):
                marked = job_id, _written(redis, job_id)
            if held > END_S:
                log.critical("event loop blocked for %.0f s; the controller exits", held)
                os._exit(1)

    def _judge(self, redis: Any, marked: tuple[str, str], held: float) -> None:
        """The loop is free again."""
        job_id, suspicion = marked
        if not job_id:
            return
        log.warning("job driver blocked the event loop for %.1f s", held, extra={"job": job_id})
        try:
            if held > STRIKE_S:
                name = keys.strikes(job_id)
                redis.zadd(name, {suspicion: redis.zcard(name)})
                redis.expire(name, WITHIN_S)
                self._struck.add(job_id)
            redis.hdel(keys.driving(), job_id)
        except RedisError as error:
            log.warning("could not store a strike: %s", error, extra={"job": job_id})


def _suspicion(reason: str) -> str:
    """Suspicion with a number, so that two controllers' reports of one event count as one strike."""
    return json.dumps([uuid.uuid4().hex, reason])


def _written(redis: Any, job_id: str) -> str:
    """Writes down the suspicion that a job holds the loop, and returns it."""
    suspicion = _suspicion("its driver held the controller's event loop")
    try:
        redis.hset(keys.driving(), job_id, suspicion)
    except RedisError as error:
        log.warning("could not store a suspicion: %s", error, extra={"job": job_id})
    return suspicion


def _noting(loop: asyncio.AbstractEventLoop, coroutine: Any, **settings: Any) -> asyncio.Task[Any]:
    """Makes a task, and notes which job's it is: the thread cannot look into its context."""
    task = asyncio.Task(coroutine, loop=loop, **settings)
    if job_id := _DRIVEN.get():
        _job_of[task] = job_id
    return task


def _holder(loop: asyncio.AbstractEventLoop) -> str:
    """The job whose task runs now; empty for any other."""
    task = asyncio.current_task(loop)
    return "" if task is None else _job_of.get(task, "")
