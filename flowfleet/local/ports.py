"""Free TCP ports for processes that must come back on the same one after a restart."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import socket
import tempfile

FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Below the ports that systems give to outgoing connections (Linux: from 32768). A port from that range could be taken
while its process restarts, even by a client that retries it: TCP lets a socket connect to itself."""

_reserved: set[int] = set()
"""Ports reserved by this process, which would be granted a second lock on the same port."""


def free_ports(count: int, host: str = "127.0.0.1", rng: random.Random | None = None) -> list[int]:
    """Finds `count` different unused ports. While this process lives none is given out again, nor by another
    process of this user: stacks that start at once do not take each other's. Raises OSError where there are not enough.
    """
    candidates = (rng or random.Random()).sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT)
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for port in candidates:
            if len(ports) == count:
                return ports
            if not _reserve(port):
                continue
            try:
                held.enter_context(socket.create_server((host, port), backlog=1))
                ports.append(port)
            except OSError:
                _release(port)
    if len(ports) < count:
        for port in ports:
            _release(port)
        raise OSError(f"no {count} free ports between {FIRST_PORT} and {LAST_PORT} on {host}")
    return ports


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Returns True if a server could listen on `port` now."""
    try:
        socket.create_server((host, port), backlog=1).close()
    except OSError:
        return False
    return True


def _reserve(port: int) -> bool:
    if port in _reserved:
        return False
    try:
        fcntl.lockf(_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:
        return False
    _reserved.add(port)
    return True


def _release(port: int) -> None:
    fcntl.lockf(_reservations(), fcntl.LOCK_UN, 1, port)
    _reserved.remove(port)


@functools.cache
def _reservations() -> int:
    """Opens the file in which each byte stands for a port: the holder of its lock has reserved the port. The locks end
    with the process, or as soon as it closes the file anywhere."""
    path = os.path.join(tempfile.gettempdir(), f"flowfleet-ports-{os.getuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
