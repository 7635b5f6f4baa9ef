"""What a fleet alone costs, in CPU time, which a busy machine hardly changes: of the controller, and of Redis.

    python -m bench.scale.upkeep [--replicas 1000 10000]

No replica is a server here: their records are in a real Redis, and the controller's own watch and desk work on them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from flowfleet.data import replicas as replicas_module
from flowfleet.data.replicas import RENEW_EVERY_S, ReplicaDirectory, ReplicaRecord
from flowfleet.redis.client import connect
from flowfleet.redis.server import RedisServer
from services.controller.fleet.watch import FleetWatch, ReplicaQueue, Want

POLL_S = 0.5
PART = 500
TIMES = 5
SAMPLES = 8


def record(index: int, jobs: int) -> ReplicaRecord:
    return ReplicaRecord(
        f"replica-{index}",
        f"127.0.0.1:{index}",
        "1",
        "",
        f"pool-{index % jobs}",
        "serving",
        f"job-{index % jobs}",
        version=1,
        digest="0" * 64,
        device_id=f"GPU-{index}",
    )


async def put(redis: Redis, records: list[ReplicaRecord]) -> None:
    directory = ReplicaDirectory(redis)
    for start in range(0, len(records), PART):
        async with redis.pipeline(transaction=False) as pipe:
            for item in records[start : start + PART]:
                await directory.put(item, pipe)
            await pipe.execute()


async def cpu_ms(work: Callable[[], Awaitable[Any]], times: int = TIMES) -> float:
    """Median of some runs, in this process."""
    spent = []
    for _ in range(times):
        began = time.process_time()
        await work()
        spent.append(1000 * (time.process_time() - began))
    return statistics.median(spent)


async def redis_cpu_s(redis: Redis) -> float:
    info: Any = await redis.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def choosing_ms(watch: FleetWatch, replicas: int, jobs: int) -> float:
    """A replica for a job and back, all of whose replicas have work already."""
    desk, want = ReplicaQueue(watch.fleet), Want(1, 1, 2 * SAMPLES)
    per_job = replicas // jobs

    async def lend() -> None:
        lent = [await desk.take("job-0", want, SAMPLES) for _ in range(min(per_job, 50))]
        for replica in lent:
            desk.give_back("job-0", replica, SAMPLES)

    return await cpu_ms(lend) / min(per_job, 50)


async def measure(url: str, replicas: int, jobs: int) -> dict[str, float]:
    redis = connect(url)
    await redis.flushdb()
    # They are renewed when it is measured, and else not.
    replicas_module.STALE_S = replicas_module.EXPIRES_S = 1e6  # type: ignore[misc]
    records = [record(index, jobs) for index in range(replicas)]
    await put(redis, records)
    watch = FleetWatch(redis)

    async def start() -> None:
        watch._revision = 0
        await watch.refresh()

    await watch.refresh()
    all_ms = await cpu_ms(start)
    before = await redis_cpu_s(redis)
    await put(redis, records)
    renewing_s = await redis_cpu_s(redis) - before
    idle_ms = await cpu_ms(watch.refresh, 20)
    published: list[float] = []
    for version in range(2, 2 + TIMES):
        await put(redis, [replace(item, version=version) for item in records[: replicas // 100]])
        published.append(await cpu_ms(watch.refresh, 1))
    result = {
        "first look, ms": all_ms,
        "look without changes, ms": idle_ms,
        "look, 1 % changed, ms": statistics.median(published),
        "CPUs, idle fleet": idle_ms / 1000 / POLL_S,
        "Redis CPUs, renewals": renewing_s / RENEW_EVERY_S,
        "choice, its share, ms": await choosing_ms(watch, replicas, jobs),
    }
    await put(redis, [replace(item, job_id="job-0", version=1, pool="pool-0") for item in records])
    await watch.refresh()
    result["choice, all one job's, ms"] = await choosing_ms(watch, replicas, 1)
    await watch.stop()
    await redis.aclose()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--jobs", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        server.start()
        try:
            for replicas in options.replicas:
                print(f"{replicas} replicas, {options.jobs} jobs")
                for name, value in asyncio.run(measure(server.url, replicas, options.jobs)).items():
                    print(f"  {name:<28}{value:>10.3f}")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
