"""A TCP proxy on loopback whose network can be lost: the wire between two processes of a chaos stack.

Lost silently, it holds every byte and accepts no connection; no peer sees it, as with a network that drops packets.
Lost by reset, it ends all connections and refuses new ones. Once restored, it forwards the held bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine
from typing import Any, Literal

HOST = "127.0.0.1"
CHUNK_BYTES = 65_536
CONNECT_S = 10.0

Loss = Literal["silent", "reset"]


class TcpProxy:
    """Listens on `port` and forwards to `target_port`, in a thread of its own."""

    def __init__(self, port: int, target_port: int) -> None:
        self.port, self.target_port = port, target_port
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{port}", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._call(self._listen())

    def lose(self, how: Loss) -> None:
        """Loses the network between the two ends."""
        self._call(self._lose(how))

    def restore(self) -> None:
        """Brings it back. Does nothing where it was not lost."""
        self._call(self._restore())

    def close(self) -> None:
        """Ends the proxy and its connections."""
        self._call(self._lose("reset"))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, HOST, self.port, reuse_address=True)

    async def _lose(self, how: Loss) -> None:
        self._open.clear()
        if how == "silent":
            return
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            _reset(writer)

    async def _restore(self) -> None:
        await self._listen()
        self._open.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        onward: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            async with asyncio.timeout(CONNECT_S):
                back, onward = await asyncio.open_connection(HOST, self.target_port)
            self._writers.add(onward)
            await asyncio.gather(self._pump(reader, onward), self._pump(back, writer))
        except (OSError, TimeoutError):
            pass  # one of the ends is gone, so is the connection
        finally:
            for end in (writer, onward):
                if end is not None:
                    self._writers.discard(end)
                    end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries bytes one way until their end, held while the network is lost."""
        while data := await reader.read(CHUNK_BYTES):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        await self._open.wait()
        with contextlib.suppress(OSError):
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection by RST, so that both ends know at once."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()
