"""What open pages cost a controller that has nothing to tell them, and how soon they hear of a change.

    python -m bench.scale.pages --pages 100 --seconds 30

Starts a Redis and a controller as processes, submits nothing, opens the pages' streams, and measures the controller's
CPU time. Then it changes one job and measures the time until every page has heard of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from flowfleet.job.spec import parse_job
from flowfleet.redis.client import connect
from flowfleet.redis.server import RedisServer
from services.controller.store.jobs import JobStore

SETTLE_S = 5.0
CHANGES = 5
JOB = {"model": {"path": "m"}, "data": {"train": "p"}, "rewards": {"ocr": {}}}


@contextmanager
def controller(redis_url: str, folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """A controller process, and its URL."""
    port_file = folder / "port"
    argv = [sys.executable, "-m", "services.controller", "--port", "0", "--port-file", str(port_file)]
    argv += ["--state-dir", str(folder / "state"), "--log-level", "error"]
    process = subprocess.Popen(argv, env={**os.environ, "FLOWFLEET_REDIS_URL": redis_url})
    try:
        while not port_file.exists():
            time.sleep(0.05)
        yield psutil.Process(process.pid), f"http://{port_file.read_text().strip()}"
    finally:
        process.terminate()
        process.wait()


async def share_of_core(process: psutil.Process, seconds: float) -> float:
    """Percent of one core over a while."""
    before, began = process.cpu_times(), time.monotonic()
    await asyncio.sleep(seconds)
    after = process.cpu_times()
    used: float = after.user + after.system - before.user - before.system
    return 100 * used / (time.monotonic() - began)


async def page(client: httpx.AsyncClient, url: str, heard: asyncio.Queue[float]) -> None:
    """Reads one stream, and notes when a message about jobs comes."""
    async with client.stream("GET", f"{url}/v1/stream", timeout=None) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line == "event: jobs":
                heard.put_nowait(time.monotonic())


async def measure(redis_url: str, num_pages: int, seconds: float, folder: Path) -> dict[str, float]:
    redis = connect(redis_url)
    store = JobStore(redis)
    record, _ = await store.create(parse_job(JOB))
    await store.set_status(record.id, "cancelled")
    with controller(redis_url, folder) as (process, url):
        await asyncio.sleep(SETTLE_S)
        alone = await share_of_core(process, seconds)
        heard: asyncio.Queue[float] = asyncio.Queue()
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as client:
            pages = [asyncio.create_task(page(client, url, heard)) for _ in range(num_pages)]
            await asyncio.sleep(SETTLE_S)
            watched = await share_of_core(process, seconds)
            delays = []
            for number in range(CHANGES):
                changed = time.monotonic()
                await store.append_event(record.id, "bench", {"number": number})
                delays.append(max([await heard.get() for _ in pages]) - changed)
            for task in pages:
                task.cancel()
            await asyncio.gather(*pages, return_exceptions=True)
    await redis.aclose()
    return {
        "pages": num_pages,
        "percent_of_core_without_pages": round(alone, 3),
        "percent_of_core_with_pages": round(watched, 3),
        "percent_of_core_a_page": round((watched - alone) / num_pages, 4),
        "last_page_hears_after_s": round(statistics.median(delays), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        server = RedisServer(Path(name))
        try:
            print(json.dumps(asyncio.run(measure(server.start(), options.pages, options.seconds, Path(name)))))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
