"""Runs a rehearsal: Redis, simulated services, the controller, jobs; then takes the figures."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis

from bench.scale import figures
from bench.scale.load import REWARD, Load, write_inputs
from bench.scale.processes import Child, Usage, read_rows, wait_for_line
from flowfleet import keys
from flowfleet.redis_server import RedisServer

MB = 1e6
ASK_EVERY_S = 1.0
REST_TIMEOUT_S = 60.0
SUBMIT_AT_ONCE = 10


@contextmanager
def fleet(load: Load, folder: Path, profile: bool) -> Iterator[tuple[RedisServer, dict[str, Child], Path]]:
    """Everything but the jobs; ended in the end, the controller first. The last is the controller's port file."""
    write_inputs(folder)
    port_file = folder / "controller.port"
    with ExitStack() as stack:
        server = RedisServer(folder / "redis")
        server.start()
        stack.callback(server.stop)
        env = {"FLOWFLEET_REDIS_URL": server.url}
        children: dict[str, Child] = {}

        def start(name: str, *argv: str) -> None:
            children[name] = Child.start(name, argv, env, folder)
            stack.callback(children[name].end)

        start("trainers", "bench.scale.trainers", load.to_json(), str(folder / "notes-trainers.json"))
        for number in range(load.processes):
            notes = str(folder / f"notes-{number}.json")
            start(f"replicas-{number}", "bench.scale.replicas", load.to_json(), str(number), notes)
        for child in children.values():
            wait_for_line(child, folder)
        flags = ["--port", "0", "--port-file", str(port_file), "--state-dir", str(folder / "state")]
        flags += ["--data-root", str(folder)]
        flags += ["--reward", f"{REWARD}={load.reward_address}", "--log-level", "warning"]
        dump = str(folder / "controller.prof") if profile else "-"
        start("controller", "bench.scale.controller", load.to_json(), str(folder / "lag.json"), dump, *flags)
        yield server, children, port_file


def rehearse(load: Load, folder: Path, profile: bool = False) -> dict[str, Any]:
    """The result, ready for JSON."""
    with fleet(load, folder, profile) as (server, children, port_file):
        started = time.monotonic()
        while not port_file.exists():
            if children["controller"].process.poll() is not None:
                raise RuntimeError((folder / "controller.log").read_text()[-2000:])
            time.sleep(0.05)
        ready_s = time.monotonic() - started
        measured = asyncio.run(_measure(load, server, children, f"http://{port_file.read_text()}", folder))
    return _result(load, folder, measured) | {"controller_ready_s": ready_s}


async def _measure(
    load: Load, server: RedisServer, children: dict[str, Child], url: str, folder: Path
) -> dict[str, Any]:
    pids = {name: child.process.pid for name, child in children.items()}
    assert server.process is not None
    pids |= {"redis": server.process.pid, "this": os.getpid()}
    store = redis.Redis.from_url(server.url)
    async with httpx.AsyncClient(base_url=url, timeout=REST_TIMEOUT_S) as client:
        submitted = await _submit(client, load, folder)
        warm = await _warm_up(store, load, submitted)
        before, first, start = store.info(), _usage(pids), time.time()
        await asyncio.to_thread(store.config_resetstat)
        asked = await _ask(client, load.seconds, next(iter(submitted)))
        end, last, after = time.time(), _usage(pids), store.info()
        commands = store.info("commandstats")
    return {
        "submitted": submitted,
        "warm": warm,
        "start": start,
        "end": end,
        "asked": asked,
        "load_average": psutil.getloadavg()[0],
        "processes": {
            name: {
                "cpu": (last[name].cpu_s - first[name].cpu_s) / (end - start),
                "rss_mb": last[name].rss / MB,
                "descriptors": last[name].descriptors,
                "threads": last[name].threads,
            }
            for name in pids
        },
        "redis": _redis_figures(commands, before, after, end - start),
    }


async def _submit(client: httpx.AsyncClient, load: Load, folder: Path) -> dict[str, float]:
    """Job → Unix seconds at which it was submitted, all as fast as the controller takes them."""
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


async def _warm_up(store: redis.Redis, load: Load, jobs: Collection[str]) -> dict[str, float]:
    """Until every job has made a step, or for as long as there is."""
    began, num_at_work = time.monotonic(), 0
    while time.monotonic() - began < load.warm_up_s and num_at_work < load.jobs:
        pipe = store.pipeline(transaction=False)
        for job_id in jobs:
            pipe.hget(keys.job(job_id), "progress.step")
        num_at_work = sum(int(step or 0) >= 1 for step in pipe.execute())
        await asyncio.sleep(1)
    return {"seconds": time.monotonic() - began, "jobs_at_work": float(num_at_work)}


async def _ask(client: httpx.AsyncClient, seconds: float, job_id: str) -> dict[str, list[float]]:
    """Seconds of REST calls, one after the other, once a second."""
    asked: dict[str, list[float]] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for path in (f"/v1/jobs/{job_id}", "/v1/jobs?limit=50", "/v1/fleet", "/metrics"):
            began = time.monotonic()
            response = await client.get(path)
            if response.is_error:
                asked.setdefault("errors", []).append(float(response.status_code))
            asked.setdefault(path.replace(job_id, "{id}"), []).append(time.monotonic() - began)
        await asyncio.sleep(ASK_EVERY_S)
    return asked


def _usage(pids: dict[str, int]) -> dict[str, Usage]:
    return {name: Usage.of(pid) for name, pid in pids.items()}


def _redis_figures(commands: Any, before: Any, after: Any, seconds: float) -> dict[str, Any]:
    rates = {name.removeprefix("cmdstat_"): row["calls"] / seconds for name, row in commands.items()}
    return {
        "ops_per_s": sum(rates.values()),
        "commands_per_s": dict(sorted(rates.items(), key=lambda item: -item[1])),
        "mb_in_per_s": after["total_net_input_bytes"] / seconds / MB,
        "mb_out_per_s": after["total_net_output_bytes"] / seconds / MB,
        "memory_mb": after["used_memory"] / MB,
        "memory_grown_mb": (after["used_memory"] - before["used_memory"]) / MB,
        "clients": after["connected_clients"],
    }


def _result(load: Load, folder: Path, measured: dict[str, Any]) -> dict[str, Any]:
    notes: list[Any] = [row for path in folder.glob("notes-*.json") for row in read_rows(path)]
    start, end = measured["start"], measured["end"]
    lag: list[Any] = read_rows(folder / "lag.json")
    counted = figures.counts(notes, start, end)
    latency = figures.latencies(notes, start, end, load.generate_s + load.train_s + load.publish_s)
    latency |= {f"start: {name}": row for name, row in figures.starts(notes, measured["submitted"]).items()}
    latency["event loop lag"] = figures.percentiles(late for when, late in lag if start <= when <= end)
    latency |= {f"GET {path}": figures.percentiles(values) for path, values in measured["asked"].items()}
    seconds = end - start
    return {
        "load": asdict(load),
        "servers": load.served,
        "seconds": seconds,
        "load_average": measured["load_average"],
        "warm_up": measured["warm"],
        "latency": latency,
        "processes": measured["processes"],
        "redis": measured["redis"],
        "samples_per_s": counted.get("generated", 0) * load.group_size / seconds,
        "steps_per_s": counted.get("train", 0) / seconds,
        "status_calls_per_s": counted.get("status", 0) / seconds,
        "refused": counted.get("refused", 0),
    }
