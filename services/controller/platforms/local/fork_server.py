"""Forks a controller's local trainers from processes that have imported torch and all the rest once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from flowfleet.process.commands import TRAINER, forkserver_command
from flowfleet.process.forks import Address, Files, Forked, ForkServer, Note
from flowfleet.process.forkserver import Order

log = logging.getLogger(__name__)

POLL_S = 0.02
TRIES = 2
SHARED_S = 60.0
"""Longest wait for a shared server, which may still import."""


class TrainerForks:
    """Forks by the server that FLOWFLEET_FORK_SERVER names, and otherwise by one of its own."""

    def __init__(self, python: str, env: Callable[[], dict[str, str]], output: Path, module: str = TRAINER) -> None:
        self._shared = Address.from_environ() if python == sys.executable else None
        self._server = ForkServer(forkserver_command(python, module), env, output)
        self._output = output

    async def fork(self, order: Order, log_file: Path, note: Note) -> None:
        """Starts a trainer. `note` is called before the trainer runs anything, and nothing runs where a caller is
        cancelled before. Raises RuntimeError when there is no trainer to be had."""
        if self._shared is not None and self._shared.forks(order.module, order.env):
            if await _ran(self._by_shared(self._shared, order, log_file, note)):
                return
            self._shared = None
        for _ in range(TRIES):
            if await _ran(self._by_own(order, log_file, note)):
                return
            log.warning("trainer fork server is gone or hangs; starting another one")
            self._server.close()
        raise RuntimeError(f"could not fork a trainer; see the log {self._output}")

    def warm(self) -> None:
        """Has a process ready for the next trainer."""
        if self._shared is None:
            self._server.ensure()

    def _by_shared(self, shared: Address, order: Order, log_file: Path, note: Note) -> Forked | None:
        with _files(log_file) as files, contextlib.suppress(OSError):
            return Forked(shared.path, order, files, note, SHARED_S)
        return None

    def _by_own(self, order: Order, log_file: Path, note: Note) -> Forked | None:
        with _files(log_file) as files, contextlib.suppress(OSError):
            return self._server.order(order, files, note)
        return None


async def _ran(forked: Forked | None) -> bool:
    """Waits until the process runs. A cancelled wait ends it before it has run anything."""
    if forked is None:
        return False
    try:
        while forked.poll() is None and forked.pid == 0:
            await asyncio.sleep(POLL_S)
    except BaseException:
        forked.abandon()
        raise
    forked.release()
    return forked.pid != 0


@contextlib.contextmanager
def _files(log_file: Path) -> Iterator[Files]:
    """Nothing to read, and a log to append to."""
    with Path(os.devnull).open("rb") as null, log_file.open("ab") as output:
        yield null.fileno(), output.fileno(), output.fileno()
