"""A server that answers each POST after a fixed time, so many at once, for next to no CPU: bodies are not even kept."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

_TOP = [{"token": "Yes", "logprob": -0.2}, {"token": "No", "logprob": -2.0}]
_CHOICE = {"message": {"content": "Yes"}, "logprobs": {"content": [{**_TOP[0], "top_logprobs": _TOP}]}}
_USAGE = {"prompt_tokens": 400, "completion_tokens": 1}
_BODY = json.dumps({"choices": [_CHOICE], "usage": _USAGE, "scores": [0.5]}).encode()
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY
"""To every request: a chat completion with log-probabilities, which also has what `http` reads."""
BUFFER_BYTES = 2**20


@contextmanager
def slow_server(latency_s: float, in_flight: int) -> Iterator[int]:
    """The server in a process of its own; yields its port on loopback."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(latency_s, in_flight, there))
    process.start()
    try:
        yield here.recv()
    finally:
        process.terminate()
        process.join()


def _serve(latency_s: float, in_flight: int, ready: Connection) -> None:
    """Runs the server on loopback until its process is ended; sends its port first."""

    async def body() -> None:
        loop = asyncio.get_running_loop()
        places = _Places(loop, latency_s, in_flight)
        server = await loop.create_server(lambda: _Requests(places), "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(body())


class _Places:
    """Who is answered now, and who waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, latency_s: float, number: int) -> None:
        self._loop = loop
        self._latency_s = latency_s
        self._free = number
        self._waiting: deque[Callable[[], None]] = deque()

    def take(self, answer: Callable[[], None]) -> None:
        """Calls `answer` after the latency, from when there is a place."""
        if not self._free:
            self._waiting.append(answer)
            return
        self._free -= 1
        self._loop.call_later(self._latency_s, self._done, answer)

    def _done(self, answer: Callable[[], None]) -> None:
        answer()
        self._free += 1
        if self._waiting:
            self.take(self._waiting.popleft())


class _Requests(asyncio.BufferedProtocol):
    """One connection. Requests must not be pipelined."""

    _scratch = bytearray(BUFFER_BYTES)
    """Shared: what was read is looked at before anything else is read."""

    def __init__(self, places: _Places) -> None:
        self._places = places
        self._head = bytearray()
        self._missing: int | None = None
        """Bytes of the body; None while its head is read."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._missing is None:
            self._head += self._scratch[:nbytes]
            head, end, rest = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._missing = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            self._head.clear()
            nbytes = len(rest)
        self._missing -= nbytes
        if self._missing <= 0:
            self._missing = None
            self._places.take(self._answer)

    def _answer(self) -> None:
        self._transport.write(ANSWER)
