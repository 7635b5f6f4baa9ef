"""Servers of the simulated services, and their notes, which they write when they end."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc

from bench.scale.load import Load
from flowfleet.process import service
from flowfleet.rpc import endpoint as rpc


class Notes:
    """(what, job, number, Unix seconds), in the order in which it happened."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, int, float]] = []

    def add(self, what: str, job_id: str, number: int) -> None:
        self.rows.append((what, job_id, number, time.time()))


def run(serve: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Serves as the command line says: the load, arguments of `serve`, and the file that says that it serves."""
    service.end_with_parent()
    sizes, *arguments, ready = sys.argv[1:]
    asyncio.run(serve(Load(**json.loads(sizes)), *arguments, Path(ready)))


async def listen(add: Any, servicer: Any, address: str) -> grpc.aio.Server:
    """Serves at host:port, without the guard of a service's own server: here the caller is what is measured."""
    server = grpc.aio.server(options=rpc._SERVER_OPTIONS)
    add(servicer, server)
    host, _, port = address.rpartition(":")
    rpc.listen(server, host, int(port))
    await server.start()
    return server


async def until_stopped(notes: Notes, ready: Path) -> None:
    """Makes the file `ready`, waits for SIGTERM, and leaves the notes next to it."""
    stop = asyncio.Event()
    service.stop_on_signals(stop)
    await asyncio.to_thread(ready.touch)
    await stop.wait()
    await asyncio.to_thread(ready.with_suffix(".notes").write_text, json.dumps(notes.rows))
