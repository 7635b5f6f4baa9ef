"""Looks at fleet, jobs, streams and Redis every few seconds, and shows what it sees to Prometheus."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Gauge
from redis.exceptions import RedisError

from flowfleet.process.clock import steady_time
from flowfleet.process.telemetry import JobMetrics
from flowfleet.redis import keys
from services.controller.concurrency import end
from services.controller.fleet.replicas import Replica
from services.controller.job.machine.state_machine import Machine
from services.controller.metrics.families import Sample, SnapshotCollector
from services.controller.metrics.totals import Totals
from services.controller.store.store import Store

log = logging.getLogger(__name__)

PERIOD_S = 2.0
REDIS_PERIOD_S = 5.0
GROUP = "controller"


class Monitor:
    """Metrics of a scheduler. `machines` gives its running jobs by id, `replicas` the fleet; `add_seconds` keeps the
    seconds of accelerators of a job, by component. From `metrics` it removes jobs that ended a while ago."""

    def __init__(
        self,
        registry: CollectorRegistry,
        redis: Any,
        machines: Callable[[], Mapping[str, Machine]],
        replicas: Callable[[], Sequence[Replica]],
        add_seconds: Callable[[str, Mapping[str, float]], Awaitable[None]],
        metrics: JobMetrics,
    ) -> None:
        self._redis = redis
        self._machines, self._replicas, self._add_seconds = machines, replicas, add_seconds
        self._metrics, self._totals = metrics, Totals()
        self._board = SnapshotCollector()
        registry.register(self._board)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._totals = Totals()
        self._tasks = [asyncio.create_task(part(), name=part.__name__) for part in (self._watch, self._watch_redis)]

    async def stop(self) -> None:
        try:
            await end(self._tasks)
        finally:
            self._board.clear()
            self._metrics.keep_only(())

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            now = time.monotonic()
            self._totals.look(self._machines(), self._replicas(), steady_time(), now - last)
            self._board.show("fleet", self._totals.samples())
            self._metrics.keep_only(self._totals.jobs)
            last = now
            await asyncio.sleep(PERIOD_S)

    async def _watch_redis(self) -> None:
        while True:
            try:
                async with asyncio.timeout(REDIS_PERIOD_S):
                    for job_id, seconds in self._totals.new_seconds().items():
                        await self._add_seconds(job_id, seconds)
                    seen = await look_at_redis(self._redis, self._totals.active)
            except (RedisError, TimeoutError) as error:
                log.warning("could not read Redis metrics: %s", error or type(error).__name__)
                self._board.show("redis", [Sample("flowfleet_redis_up", (), 0)])
            else:
                for job_id, stream in seen.streams.items():
                    self._totals.release_before(job_id, stream.released_before)
                self._board.show("redis", seen.samples())
            await asyncio.sleep(REDIS_PERIOD_S)


@dataclass(frozen=True)
class StreamView:
    """A job's streams."""

    entries: int
    dead: int
    pending: int
    oldest_pending_s: float
    released_before: int
    """Step of the oldest kept checkpoint: what was before it is freed."""


@dataclass(frozen=True)
class RedisView:
    """A look at Redis. `info` is its INFO."""

    info: Mapping[str, Any]
    streams: Mapping[str, StreamView]
    """Streams by job."""

    def samples(self) -> Iterator[Sample]:
        for job_id, stream in self.streams.items():
            yield Sample("flowfleet_stream_entries", (job_id, "trajectories"), stream.entries)
            yield Sample("flowfleet_stream_entries", (job_id, "dead_letters"), stream.dead)
            yield Sample("flowfleet_stream_pending_entries", (job_id,), stream.pending)
            yield Sample("flowfleet_stream_oldest_pending_age_seconds", (job_id,), stream.oldest_pending_s)
        info = self.info
        yield Sample("flowfleet_redis_up", (), 1)
        yield Sample("flowfleet_redis_memory_bytes", (), info["used_memory"])
        limit = info["maxmemory"] or info["total_system_memory"]
        yield Sample("flowfleet_redis_memory_limit_bytes", (), limit)
        yield Sample("flowfleet_redis_clients", (), info["connected_clients"])
        yield Sample("flowfleet_redis_commands_total", (), info["total_commands_processed"])
        yield Sample("flowfleet_redis_received_bytes_total", (), info["total_net_input_bytes"])
        yield Sample("flowfleet_redis_sent_bytes_total", (), info["total_net_output_bytes"])


async def look_at_redis(redis: Any, jobs: Sequence[str]) -> RedisView:
    """Redis itself, and the streams of these jobs, in one round trip."""
    pipe = redis.pipeline(transaction=False).info().time()
    for job_id in jobs:
        stream = keys.trajectories(job_id)
        pipe.xlen(stream).xlen(keys.dead_trajectories(job_id)).hkeys(keys.checkpoints(job_id)).xpending(stream, GROUP)
    info, (seconds, microseconds), *found = await pipe.execute(raise_on_error=False)
    now_ms = 1000 * seconds + microseconds / 1000
    rows = [found[start : start + 4] for start in range(0, len(found), 4)]
    return RedisView(info, {job_id: _stream(row, now_ms) for job_id, row in zip(jobs, rows, strict=True)})


def _stream(row: Sequence[Any], now_ms: float) -> StreamView:
    """State of a job's stream. A job without a stream has no group to ask about."""
    entries, dead, checkpoints, pending = row
    for reply in (entries, dead, checkpoints):
        if isinstance(reply, Exception):
            raise reply
    number, oldest = (0, None) if isinstance(pending, Exception) else (pending["pending"], pending["min"])
    age_s = max(0.0, (now_ms - int(oldest.partition(b"-")[0])) / 1000) if oldest else 0.0
    return StreamView(entries, dead, number, age_s, min(map(int, checkpoints), default=0))


async def count_jobs(store: Store, registry: CollectorRegistry, leads: Callable[[], bool]) -> None:
    """Keeps `flowfleet_controller_jobs{status}` true, until cancelled. Only the controller that leads shows it, so that
    a sum over controllers counts each job once."""
    gauge = Gauge("flowfleet_controller_jobs", "Jobs by status", ["status"], registry=registry)
    while True:
        try:
            counts = await store.lists.counts() if leads() else {}
            gauge.clear()
            for status, count in counts.items():
                gauge.labels(status=str(status)).set(count)
        except RedisError as error:
            log.warning("could not count jobs: %s", error)
        await asyncio.sleep(REDIS_PERIOD_S)
