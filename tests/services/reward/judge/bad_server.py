"""A server that answers chat completions as a test says, also in ways that no HTTP library would."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Reply = Callable[["Asked", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Asked:
    """A request: its JSON, its headers, and which one of the server it is, from 0."""

    body: dict[str, Any]
    headers: dict[str, str]
    number: int


@dataclass
class Server:
    url: str
    asked: list[Asked] = field(default_factory=list)
    most_at_once: int = 0


@asynccontextmanager
async def serving(reply: Reply, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Answers every request with `reply`, on a free port of loopback."""
    server = Server("")
    busy = 0
    open_writers: set[asyncio.StreamWriter] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal busy
        open_writers.add(writer)
        try:
            while True:
                first = await reader.readexactly(1)
                if first == b"\x16":  # TLS knocks at a plain door
                    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
                    return
                head = (first + await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                pairs = (line.split(": ", 1) for line in head[1:] if line)
                headers = {name.lower(): value for name, value in pairs}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                asked = Asked(body, headers, len(server.asked))
                server.asked.append(asked)
                busy += 1
                server.most_at_once = max(server.most_at_once, busy)
                try:
                    await reply(asked, writer)
                finally:
                    busy -= 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            open_writers.discard(writer)
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls, limit=2**26)
    port = listening.sockets[0].getsockname()[1]
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}/v1"
    try:
        yield server
    finally:
        listening.close()
        for writer in list(open_writers):
            writer.transport.abort()


def completion(text: str, *tokens: tuple[str, dict[str, float]]) -> bytes:
    """A chat completion; tokens: what was said and the log-probabilities in its place."""
    content = [
        {"token": said, "logprob": top[said], "top_logprobs": [{"token": t, "logprob": p} for t, p in top.items()]}
        for said, top in tokens
    ]
    choice = {
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "logprobs": {"content": content} if tokens else None,
    }
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 1}}).encode()


def status(code: int, body: bytes = b"", content_type: str = "application/json", **headers: str) -> Reply:
    """Answers with a whole HTTP response."""

    async def reply(asked: Asked, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {code} Status", f"content-length: {len(body)}", f"content-type: {content_type}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()

    return reply


def says(text: str, *tokens: tuple[str, dict[str, float]]) -> Reply:
    return status(200, completion(text, *tokens))


async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def slow_loris(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """A byte now and then, so that the connection is never silent for long."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\ncontent-type: application/json\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def close(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def truncate(asked: Asked, writer: asyncio.StreamWriter) -> None:
    body = completion("Yes")
    writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body[: len(body) // 2])
    await writer.drain()
    writer.close()
