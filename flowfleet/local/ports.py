"""Free TCP ports for processes that must come back on the same one after a restart."""

from __future__ import annotations

import contextlib
import random
import socket

FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Below the ports that systems give to outgoing connections (Linux: from 32768). A port from that range could be taken
while its process restarts, even by a client that retries it: TCP lets a socket connect to itself."""


def free_ports(count: int, host: str = "127.0.0.1", rng: random.Random | None = None) -> list[int]:
    """`count` different ports that nobody listens on. Raises OSError where there are not enough."""
    candidates = (rng or random.Random()).sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT)
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for port in candidates:
            if len(ports) == count:
                return ports
            with contextlib.suppress(OSError):
                held.enter_context(_bound(host, port))
                ports.append(port)
    if len(ports) < count:
        raise OSError(f"no {count} free ports between {FIRST_PORT} and {LAST_PORT} on {host}")
    return ports


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on `port` now."""
    try:
        _bound(host, port).close()
    except OSError:
        return False
    return True


def _bound(host: str, port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(1)
    except OSError:
        server.close()
        raise
    return server
