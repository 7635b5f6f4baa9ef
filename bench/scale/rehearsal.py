"""Runs a rehearsal: Redis, simulated services, the controller, jobs; then takes the figures."""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis

from bench.process import started
from bench.scale import figures
from bench.scale.load import REWARD, Load, write_inputs
from flowfleet.redis import keys
from flowfleet.redis.server import RedisServer

MB = 1e6
ASK_EVERY_S = 1.0
REST_TIMEOUT_S = 60.0
WARM_UP_S = 180.0
"""Longest wait until every job has made a step."""
SUBMIT_AT_ONCE = 10


@contextmanager
def fleet(load: Load, folder: Path) -> Iterator[tuple[RedisServer, dict[str, int], str]]:
    """Starts everything but the jobs, and ends it, the controller first. Yields Redis, process ids and the URL."""
    write_inputs(folder)
    with ExitStack() as stack:
        server = RedisServer(folder / "redis")
        url = server.start()
        stack.callback(server.stop)
        pids = {"this": os.getpid()}

        def start(name: str, *flags: str) -> Path:
            module, ready = f"bench.scale.{name.partition('-')[0]}", folder / f"{name}.ready"
            process = started(ready, module, load.to_json(), *flags, FLOWFLEET_REDIS_URL=url)
            pids[name] = stack.enter_context(process)
            return ready

        start("trainers", str(folder / "trainers.ready"))
        for number in range(load.processes):
            start(f"replicas-{number}", str(number), str(folder / f"replicas-{number}.ready"))
        flags = ["--port", "0", "--port-file", str(folder / "controller.ready"), "--state-dir", str(folder / "state")]
        flags += ["--data-root", str(folder), "--reward", f"{REWARD}={load.reward_address}", "--log-level", "warning"]
        ready = start("controller", str(folder / "lag.json"), *flags)
        assert server.process is not None
        yield server, pids | {"redis": server.process.pid}, f"http://{ready.read_text()}"


def rehearse(load: Load, folder: Path) -> dict[str, Any]:
    """Returns the result, ready for JSON."""
    with fleet(load, folder) as (server, pids, url):
        measured = asyncio.run(_measure(load, server, pids, url, folder))
    return _result(load, folder, measured)


async def _measure(load: Load, server: RedisServer, pids: Mapping[str, int], url: str, folder: Path) -> dict[str, Any]:
    store = redis.Redis.from_url(server.url)
    async with httpx.AsyncClient(base_url=url, timeout=REST_TIMEOUT_S, trust_env=False) as client:
        submitted = await _submit(client, load, folder)
        warm = await _warm_up(store, load, submitted)
        commands: Any = store.info()
        first, start = {name: _cpu_s(pid) for name, pid in pids.items()}, time.time()
        asked = await _ask(client, load.seconds, next(iter(submitted)))
        end, after = time.time(), store.info()
    return {
        "submitted": submitted,
        "jobs_at_work": warm,
        "start": start,
        "end": end,
        "asked": asked,
        "processes": [_used(name, pid, first[name], end - start) for name, pid in pids.items()],
        "redis_commands_per_s": (after["total_commands_processed"] - commands["total_commands_processed"])
        / (end - start),
        "redis_mb": after["used_memory"] / MB,
    }


async def _submit(client: httpx.AsyncClient, load: Load, folder: Path) -> dict[str, float]:
    """Submits all jobs as fast as the controller takes them; returns Unix seconds by job."""
    submitted: dict[str, float] = {}
    turn = asyncio.Semaphore(SUBMIT_AT_ONCE)

    async def submit(pool: int) -> None:
        async with turn:
            began = time.time()
            response = await client.post("/v1/jobs", json=load.job(pool, folder))
            response.raise_for_status()
            submitted[response.json()["id"]] = began

    await asyncio.gather(*(submit(pool) for pool in range(load.jobs)))
    return submitted


async def _warm_up(store: redis.Redis, load: Load, jobs: Collection[str]) -> int:
    """Waits until every job has made a step, or the time is up; returns how many have."""
    began, num_at_work = time.monotonic(), 0
    while time.monotonic() - began < WARM_UP_S and num_at_work < load.jobs:
        pipe = store.pipeline(transaction=False)
        for job_id in jobs:
            pipe.hget(keys.job(job_id), "progress.step")
        num_at_work = sum(int(step or 0) >= 1 for step in pipe.execute())
        await asyncio.sleep(1)
    return num_at_work


async def _ask(client: httpx.AsyncClient, seconds: float, job_id: str) -> dict[str, list[float]]:
    """Returns seconds of REST calls, which are made one after the other, once a second."""
    asked: dict[str, list[float]] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for path in ("/healthz", f"/v1/jobs/{job_id}"):
            began = time.monotonic()
            (await client.get(path)).raise_for_status()
            asked.setdefault(path.replace(job_id, "{id}"), []).append(time.monotonic() - began)
        await asyncio.sleep(ASK_EVERY_S)
    return asked


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _used(name: str, pid: int, cpu_before_s: float, seconds: float) -> dict[str, Any]:
    process = psutil.Process(pid)
    return {
        "process": name,
        "cpus": (_cpu_s(pid) - cpu_before_s) / seconds,
        "rss_mb": process.memory_info().rss / MB,
    }


def _result(load: Load, folder: Path, measured: dict[str, Any]) -> dict[str, Any]:
    notes: list[Any] = [row for path in folder.glob("*.notes") for row in json.loads(path.read_text())]
    start, end, submitted, asked = (measured.pop(name) for name in ("start", "end", "submitted", "asked"))
    counted = Counter(what for what, _, _, when in notes if start <= when <= end)
    latency = figures.latencies(notes, start, end) | {"start": figures.starts(notes, submitted)}
    lag: list[Any] = json.loads((folder / "lag.json").read_text())
    latency["event loop lag"] = figures.percentiles(late for when, late in lag if start <= when <= end)
    latency |= {f"GET {path}": figures.percentiles(values) for path, values in asked.items()}
    seconds = end - start
    return {
        "load": asdict(load),
        "seconds": seconds,
        **measured,
        "latency_ms": latency,
        "samples_per_s": counted["generated"] * load.group_size / seconds,
        "status_calls_per_s": counted["status"] / seconds,
    }
