"""What the monitor reads of a real Redis, and how it shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import RedisError

from flowfleet.api.fleet import Health
from flowfleet.data.streams import TrajectoryConsumer, TrajectoryStream
from flowfleet.process.telemetry import JobMetrics
from flowfleet.proto import common_pb2
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.fleet.replicas import Replica
from services.controller.job.machine.state_machine import Machine
from services.controller.metrics import families
from services.controller.metrics.families import Sample
from services.controller.metrics.monitor import Monitor, look_at_redis
from services.controller.store.store import Store
from tests.services.controller.metrics.test_totals import running
from tests.waiting import until


def sample(index: int) -> common_pb2.Sample:
    return common_pb2.Sample(id=common_pb2.SampleId(job_id="a", step=0, group=0, index=index))


async def no_seconds(job_id: str, seconds: Mapping[str, float]) -> None: ...


async def shown(redis: Redis, *jobs: str) -> dict[tuple[str, ...], float]:
    return {(name, *labels): value for name, labels, value in (await look_at_redis(redis, jobs)).samples()}


async def test_streams_are_measured(redis_url: str) -> None:
    redis = connect(redis_url)
    stream, consumer = TrajectoryStream(redis, "a"), TrajectoryConsumer(redis, "a", consumer="c")
    first = await stream.publish(sample(0))
    for index in (1, 2):
        await stream.publish(sample(index))
    handed, _ = await consumer.read(2, 100)
    await redis.hset(keys.checkpoints("a"), mapping={"4": "{}", "2": "{}"})
    await asyncio.sleep(0.05)
    view = await look_at_redis(redis, ["a", "b"])
    assert (view.streams["a"].entries, view.streams["a"].pending, view.streams["a"].dead) == (3, 2, 0)
    assert view.streams["a"].released_before == 2
    seconds, microseconds = await redis.time()
    age_s = seconds + microseconds / 1e6 - int(first.partition("-")[0]) / 1000
    assert 0.05 <= view.streams["a"].oldest_pending_s <= age_s
    assert (view.streams["b"].entries, view.streams["b"].pending, view.streams["b"].oldest_pending_s) == (0, 0, 0.0)
    await consumer.bury(handed, "a test")
    found = await shown(redis, "a")
    assert found["flowfleet_stream_entries", "a", "dead_letters"] == 1
    assert found["flowfleet_stream_entries", "a", "trajectories"] == 3
    assert found["flowfleet_stream_pending_entries", "a"] == 1
    await redis.aclose()


async def test_redis_tells_of_itself(redis_url: str) -> None:
    redis = connect(redis_url)
    found = await shown(redis)
    info = await redis.info()
    assert found["flowfleet_redis_up",] == 1
    assert found["flowfleet_redis_memory_limit_bytes",] == (info["maxmemory"] or info["total_system_memory"])
    assert 0 < found["flowfleet_redis_memory_bytes",] < found["flowfleet_redis_memory_limit_bytes",]
    assert 0 < found["flowfleet_redis_commands_total",] <= info["total_commands_processed"]
    await redis.aclose()


async def test_a_leader_shows_what_it_sees_and_one_that_stops_shows_nothing(redis_url: str) -> None:
    redis, registry = connect(redis_url), CollectorRegistry()
    machines: dict[str, Machine] = {"a": running()}
    replica = Replica("r0", "h:1", health=Health.SERVING, job_id="a", version=0)
    metrics = JobMetrics(registry)
    watch = Monitor(registry, redis, lambda: machines, lambda: [replica], Store(redis).lists.add_seconds, metrics)
    for job_id in ("a", "forgotten"):
        metrics.observe(job_id, {"actor/loss": 0.5})
    await watch.start()
    await until(lambda: value(registry, "flowfleet_redis_up") == 1)
    assert value(registry, "flowfleet_fleet_replicas", pool="default", health="serving") == 1
    assert value(registry, "flowfleet_job_status", job="a", status="running") == 1
    assert [value(registry, "flowfleet_actor_loss", job=job_id) for job_id in ("a", "forgotten")] == [0.5, None]
    await watch.stop()
    assert not list(registry.collect())
    await redis.aclose()


async def test_it_says_when_redis_does_not_answer(redis_url: str) -> None:
    class Away:
        def pipeline(self, **_: bool) -> None:
            raise RedisError("away")

    registry = CollectorRegistry()
    watch = Monitor(registry, Away(), dict, list, no_seconds, JobMetrics(registry))
    await watch.start()
    await until(lambda: value(registry, "flowfleet_redis_up") == 0)
    await watch.stop()


def test_descriptions_cover_what_is_shown() -> None:
    registry = CollectorRegistry()
    board = families.SnapshotCollector()
    registry.register(board)
    board.show("redis", [Sample("flowfleet_redis_commands_total", (), 3.0)])
    assert value(registry, "flowfleet_redis_commands_total") == 3.0


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)
