"""HTTP connections, bounded in time and number, so that clients which send nothing cannot keep others out.

A connection waits while it has no request in progress: before its first one, with half its header or body sent, or
between two. It may wait for `header_timeout_s`, and for its body as long as body.py says. When all are taken, the one
that has waited longest gives way to a new one; a connection with a request in progress never does. An event stream is a
request in progress: it may be silent as long as it likes, but the number of streams is limited.
"""

import asyncio
import resource
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import MappingProxyType

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from flowfleet.errors import Unavailable

WRITE_TIMEOUT_S = 60.0
"""A client that reads nothing of its response for so long is cut off."""


_ALL = ("", "")
_SHARE = {"key": 4, "address": 2}
"""A key may hold a fourth of the event streams, an address, which a proxy may give to many callers, a half."""


class Streams:
    """Counts the open event streams, in all and by caller."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[tuple[str, str]] = Counter()

    def counted(
        self, stream: AsyncIterator[str], callers: Mapping[str, str] = MappingProxyType({})
    ) -> AsyncIterator[str]:
        """The same stream, counted until it ends. `callers`: its key's name and its address, each of which has a share.
        Raises Unavailable (503) above a limit."""
        advice = "close some, ask for pages of events, or raise --max-streams"
        if self._open[_ALL] >= self._most:
            raise Unavailable(f"{self._most} event streams are open, which is the limit: {advice}")
        for kind, name in callers.items():
            if self._open[kind, name] >= (share := max(1, self._most // _SHARE[kind])):
                raise Unavailable(f"the {kind} {name} has {share} event streams open, which is its share: {advice}")
        counted = self._until_end(stream, lambda: end())
        self._count((_ALL, *callers.items()), 1)
        end = weakref.finalize(counted, self._count, (_ALL, *callers.items()), -1)  # also of one that never begins
        return counted

    async def _until_end(self, stream: AsyncIterator[str], end: Callable[[], object]) -> AsyncIterator[str]:
        try:
            async for text in stream:
                yield text
        finally:
            end()

    def _count(self, callers: Iterable[tuple[str, str]], number: int) -> None:
        for caller in callers:
            self._open[caller] += number
            if not self._open[caller]:
                del self._open[caller]


def file_limit(most: int) -> int:
    """Connections that this process may hold: `most`, or half of its open files where that is less. Raises the limit
    of open files as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 4 * most:
        soft = 4 * most if hard == resource.RLIM_INFINITY else min(4 * most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else min(most, soft // 2)


class BoundedProtocol(H11Protocol):
    """Connection with these bounds. Its class attributes are the server's settings, set by `bounded`."""

    header_timeout_s: float
    max_connections: int
    waits_since: float | None = None
    """Seconds of the loop's clock; None while a request is in progress."""
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.max_connections and not self._make_room():
            transport.abort()
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._header_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def _look(self) -> None:
        """Starts to count when the connection begins to wait, and stops when a request begins."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if not is_answered and self.conn.their_state is not h11.SEND_BODY:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = self.loop.time()
        if not is_answered and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif is_answered and self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _make_room(self) -> bool:
        waiting = [other for other in self.connections if getattr(other, "waits_since", None) is not None]
        if waiting:
            oldest = min(waiting, key=lambda other: other.waits_since)  # type: ignore[union-attr]
            oldest.transport.abort()
            self.connections.discard(oldest)
        return bool(waiting)


def bounded(header_timeout_s: float, max_connections: int) -> type[BoundedProtocol]:
    """The protocol for uvicorn, with its limits."""
    limits = {"header_timeout_s": header_timeout_s, "max_connections": file_limit(max_connections)}
    return type("Protocol", (BoundedProtocol,), limits)
