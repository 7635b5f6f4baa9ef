"""Servers of the simulated services, and their notes, which they write when they end."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc

from flowfleet.process import service
from flowfleet.rpc import endpoint as rpc


class Notes:
    """(what, job, number, Unix seconds), in the order in which it happened."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, int, float]] = []

    def add(self, what: str, job_id: str, number: int) -> None:
        self.rows.append((what, job_id, number, time.time()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.rows))


async def listen(add: Any, servicer: Any, address: str) -> grpc.aio.Server:
    """Serves at host:port, without the guard of a service's own server: here the caller is what is measured."""
    server = grpc.aio.server(options=rpc._SERVER_OPTIONS)
    add(servicer, server)
    host, _, port = address.rpartition(":")
    rpc.listen(server, host, int(port))
    await server.start()
    return server


async def until_stopped(notes: Notes, path: Path) -> None:
    """Says that it serves, waits for SIGTERM, and leaves the notes."""
    stop = asyncio.Event()
    service.stop_on_signals(stop)
    print("ready", flush=True)
    await stop.wait()
    notes.write(path)
    sys.stdout.flush()
