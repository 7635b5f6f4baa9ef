"""Connections that send nothing block no client, and event streams may be silent."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowfleet.errors import Unavailable
from services.controller.api.connections import Streams
from services.controller.settings import ControllerSettings
from tests.services.controller.test_process import IDLE, controller

Job = Callable[..., dict[str, Any]]
HEADER_S = 1
HALF = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "
FEW_FILES = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")


@pytest.fixture
def address(redis_url: str, tmp_path: Path) -> Iterator[str]:
    """A controller that may open 256 files, so holds 128 connections, two of them event streams."""
    flags = ["--header-timeout-s", str(HEADER_S), "--max-streams", "2"]
    with controller(IDLE, redis_url, tmp_path, flags=flags, prefix=FEW_FILES) as (_, address):
        yield address


def connect(address: str, sent: bytes) -> socket.socket:
    host, _, port = address.partition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(sent)
    return connection


def drip(connection: socket.socket, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        connection.sendall(b"x")
        time.sleep(0.1)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_300_half_headers_keep_nobody_out_and_a_silent_stream_lives(address: str, job: Job) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=f"http://{address}", timeout=20))
        url = f"/v1/jobs/{client.post('/v1/jobs', json=job()).json()['id']}"
        events = {"Accept": "text/event-stream"}
        streams = [stack.enter_context(client.stream("GET", f"{url}/events", headers=events)) for _ in range(2)]
        lines = [stream.iter_lines() for stream in streams]
        for each in lines:
            assert next(line for line in each if line.startswith("data:"))
        refused = client.get(f"{url}/events", headers=events)
        assert (refused.status_code, "--max-streams" in refused.text) == (503, True)
        assert refused.headers["retry-after"]

        began = time.monotonic()
        half = [stack.enter_context(connect(address, HALF)) for _ in range(300)]
        for _ in range(3):
            assert httpx.get(f"http://{address}/healthz", timeout=5).status_code == 200
        assert all(is_closed(connection) for connection in half[:150]), "the oldest give way"
        assert is_closed(half[-1]), "its header did not come"
        assert time.monotonic() - began >= HEADER_S - 0.5

        assert client.post(f"{url}/pause").status_code == 202
        for each in lines:
            assert '"action":"pause"' in next(line for line in each if line.startswith("data:"))


def test_300_half_bodies_keep_nobody_out(address: str) -> None:
    half = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n{"
    with ExitStack() as stack:
        bodies = [stack.enter_context(connect(address, half)) for _ in range(300)]
        for _ in range(3):
            assert httpx.get(f"http://{address}/healthz", timeout=5).status_code == 200
        assert all(is_closed(connection) for connection in bodies[:150]), "the oldest give way"
        time.sleep(1.5 * HEADER_S)
        bodies[-1].sendall(b'"a": 1}')
        assert b"422" in bodies[-1].recv(1000), "a body may take longer than a header"


def test_a_body_that_drips_after_its_answer_ends_as_well(address: str) -> None:
    """The 404 is given without the body, of which each byte would keep the connection."""
    with connect(address, b"POST /nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n") as drips:
        assert b"404" in drips.recv(1000)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            drip(drips, 10 * HEADER_S)


async def test_a_stream_counts_until_it_ends() -> None:
    async def endless() -> AsyncIterator[str]:
        while True:
            yield "text"

    streams = Streams(1)
    streams.counted(endless())  # never begun: its client had left
    first = streams.counted(endless())
    await anext(first)
    with pytest.raises(Unavailable, match="1 event streams are open"):
        streams.counted(endless())
    await first.aclose()  # type: ignore[attr-defined]
    streams.counted(endless())


async def test_no_key_and_no_address_holds_all_streams() -> None:
    async def endless() -> AsyncIterator[str]:
        while True:
            yield "text"

    streams, kept = Streams(16), list[AsyncIterator[str]]()

    def opened(key: str, address: str) -> int:
        before = len(kept)
        with contextlib.suppress(Unavailable):
            while True:  # before any of them is read
                kept.append(streams.counted(endless(), {"key": key, "address": address}))
        return len(kept) - before

    assert [opened("looks", address) for address in ("a", "b")] == [4, 0]
    assert [opened(f"key {number}", "a") for number in range(3)] == [4, 0, 0]
    assert opened("another", "b") == 4
    await anext(kept[0])
    await kept[0].aclose()  # type: ignore[attr-defined]
    kept.clear()
    assert opened("looks", "a") == 4


def test_streams_leave_room(settings: ControllerSettings) -> None:
    with pytest.raises(ValueError, match="--max-streams 10 must be below --max-connections 10"):
        ControllerSettings(redis_url=settings.redis_url, max_connections=10, max_streams=10)
