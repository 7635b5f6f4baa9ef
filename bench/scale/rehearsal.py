"""Runs a rehearsal: Redis, simulated services, the controller, jobs; then takes the figures."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
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
from flowfleet.redis import keys
from flowfleet.redis.server import RedisServer

MB = 1e6
ASK_EVERY_S = 1.0
REST_TIMEOUT_S = 60.0
SUBMIT_AT_ONCE = 10


@contextmanager
def fleet(
    load: Load, folder: Path, profile: bool
) -> Iterator[tuple[RedisServer, dict[str, Child], Path, Callable[[str], None]]]:
    """Everything but the jobs; ended in the end, the controller first. The last two are the controller's port file, and
    what starts the controller at a port."""
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
            stack.callback(lambda: children[name].end())

        start("trainers", "bench.scale.trainers", load.to_json(), str(folder / "notes-trainers.json"))
        for number in range(load.processes):
            notes = str(folder / f"notes-{number}.json")
            start(f"replicas-{number}", "bench.scale.replicas", load.to_json(), str(number), notes)
        for child in children.values():
            wait_for_line(child, folder)
        if load.traces:
            collector = folder / "collector.port"
            start("collector", "bench.scale.tracing.collector", str(collector))
            wait_for_line(children["collector"], folder)
            env["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://{collector.read_text()}"
        start("probe", "bench.scale.probe", str(port_file), str(folder / "healthz.json"))
        flags = ["--port-file", str(port_file), "--state-dir", str(folder / "state")]
        flags += ["--data-root", str(folder)]
        flags += ["--reward", f"{REWARD}={load.reward_address}", "--log-level", "warning"]
        dump = str(folder / "controller.prof") if profile else "-"

        def start_controller(port: str) -> None:
            lag = str(folder / "lag.json")
            start("controller", "bench.scale.controller", load.to_json(), lag, dump, *flags, "--port", port)

        start_controller("0")
        yield server, children, port_file, start_controller


def rehearse(load: Load, folder: Path, profile: bool = False) -> dict[str, Any]:
    """The result, ready for JSON."""
    with fleet(load, folder, profile) as (server, children, port_file, start_controller):
        started = time.monotonic()
        while not port_file.exists():
            if children["controller"].process.poll() is not None:
                raise RuntimeError((folder / "controller.log").read_text()[-2000:])
            time.sleep(0.05)
        ready_s = time.monotonic() - started
        address = port_file.read_text()
        killing = threading.Event()

        def kill() -> None:
            if not killing.wait(load.kill_after_s):
                children["controller"].process.kill()
                children["controller"].process.wait()
                start_controller(address.rpartition(":")[2])

        measured = asyncio.run(_measure(load, server, children, f"http://{address}", folder, kill))
        killing.set()
    return _result(load, folder, measured) | {"controller_ready_s": ready_s}


async def _measure(
    load: Load, server: RedisServer, children: dict[str, Child], url: str, folder: Path, kill: Callable[[], None]
) -> dict[str, Any]:
    assert server.process is not None
    others = {"redis": server.process.pid, "this": os.getpid()}
    pids = {name: child.process.pid for name, child in children.items()} | others
    store = redis.Redis.from_url(server.url)
    async with httpx.AsyncClient(base_url=url, timeout=REST_TIMEOUT_S) as client:
        submitted = await _submit(client, load, folder)
        warm = await _warm_up(store, load, submitted)
        before, first, start = store.info(), _usage(pids), time.time()
        await asyncio.to_thread(store.config_resetstat)
        killing = asyncio.create_task(asyncio.to_thread(kill)) if load.kill_after_s else None
        asked = await _ask(client, load.seconds, next(iter(submitted)))
        if killing is not None:
            await killing
            pids |= {"controller": children["controller"].process.pid}
            first |= {"controller": Usage(0.0, 0, 0, 0)}
        end, last, after = time.time(), _usage(pids), store.info()
        commands = store.info("commandstats")
    return {
        "submitted": submitted,
        "warm": warm,
        "start": start,
        "end": end,
        "killed": start + load.kill_after_s if load.kill_after_s else None,
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
    """Waits until every job has made a step, or the time is up."""
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
            try:
                response = await client.get(path)
            except httpx.TransportError:
                continue  # it was killed, and starts
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
    probed: list[Any] = [row for row in read_rows(folder / "healthz.json") if start <= row[0] <= end]
    latency["GET /healthz, probe"] = figures.percentiles(took for _, took in probed if took is not None)
    if killed := measured["killed"]:
        latency["killed: /healthz again"] = figures.first_after(killed, [w for w, took in probed if took is not None])
        driven = [when for what, _, _, when in notes if what == "configure"]
        latency["killed: driven again"] = figures.first_after(killed, driven)
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
