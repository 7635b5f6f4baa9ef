"""HTTP of the scorers that ask others: connections are kept and pooled, answers bounded.

aiohttp, because what a call costs in CPU bounds what one service can ask: httpx looks through all connections of its
pool at every step of a call.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp

MAX_ANSWER_BYTES: Final = 2**24
_CONNECT_S: Final = 10.0
"""Limit on making a connection and its TLS."""
_KEEP_ALIVE_S: Final = 4.0
"""Less than the 5 s after which uvicorn, and so vLLM, closes an idle connection: a call would meet its end."""

CUT_OFF: Final = "the handshake of TLS was cut off"


class TooLong(Exception):
    """An answer of more than MAX_ANSWER_BYTES."""

    def __init__(self) -> None:
        super().__init__(f"more than {MAX_ANSWER_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class Reply:
    """`headers` are found by name in any case."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


def open_session(tls: ssl.SSLContext, timeout_s: float, headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Opens a session for one event loop, which must run. The caller limits concurrent calls.

    timeout_s: of a call in all, waiting for a connection and the answer's last byte included.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=tls, limit=0, keepalive_timeout=_KEEP_ALIVE_S),
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity", **headers},
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s)),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def post(session: aiohttp.ClientSession, url: str, body: bytes) -> Reply:
    """Sends JSON; follows no redirect, tries once. Cancelling it closes the connection.

    Raises aiohttp.ClientError, TimeoutError (of which aiohttp.ConnectionTimeoutError is one) and TooLong.
    """
    async with session.post(url, data=body, allow_redirects=False) as response:
        chunks: list[bytes] = []
        size = 0
        async for chunk in response.content.iter_any():
            chunks.append(chunk)
            if (size := size + len(chunk)) > MAX_ANSWER_BYTES:
                raise TooLong
        return Reply(response.status, response.reason or "", response.headers, b"".join(chunks))


def tls_complaint(error: BaseException | None) -> str | None:
    """Returns OpenSSL's message if TLS caused the error, else None."""
    while error is not None:
        if isinstance(error, ssl.SSLError) and not isinstance(error, aiohttp.ClientError):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def connect_complaint(error: aiohttp.ClientError) -> str | None:
    """Why there was no connection, where that is the reason of an error."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return str(error.os_error) or CUT_OFF
    return "timed out" if isinstance(error, aiohttp.ConnectionTimeoutError) else None
