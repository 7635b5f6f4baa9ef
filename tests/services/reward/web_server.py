"""A small HTTP server of a test, whose every answer is a function of the test, down to the bytes."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """A request: header names in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Answer = Callable[[Asked], Awaitable[bytes | tuple[int, bytes]]]


@dataclass
class WebServer:
    """`answer` gives a body, or a status and a body; bytes that begin with HTTP/ go out as they are."""

    answer: Answer
    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    busy: int = 0
    most_busy: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await _head(reader):
                await self._one(head, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        asked = Asked(first.split(" ")[1], headers, await reader.readexactly(int(headers.get("content-length", 0))))
        self.asked.append(asked)
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        try:
            given = await self.answer(asked)
        finally:
            self.busy -= 1
        status, body = given if isinstance(given, tuple) else (200, given)
        head_of_answer = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write(body if body.startswith(b"HTTP/") else head_of_answer + body)
        await writer.drain()
        if body.startswith(b"HTTP/"):
            writer.close()


@asynccontextmanager
async def web_server(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[WebServer]:
    """On a free port of loopback."""
    served = WebServer(answer)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0, ssl=tls)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()


async def _head(reader: asyncio.StreamReader) -> str:
    """ "" at the end, and for what is no HTTP."""
    try:
        first = await reader.readexactly(1)
        return (first + await reader.readuntil(b"\r\n\r\n")).decode()[:-4] if first.isalpha() else ""
    except asyncio.IncompleteReadError:
        return ""
