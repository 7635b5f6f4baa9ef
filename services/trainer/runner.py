"""Rank 0's commands, one at a time on one thread; each is sent to the other ranks before it runs here.

A command outlives the call that asked for it: a controller that was killed asks again and joins what is running.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from flowfleet.errors import FlowfleetError
from flowfleet.hardware import devices
from services.trainer import termination
from services.trainer.commands import Command, Kind
from services.trainer.worker import Worker

log = logging.getLogger(__name__)

T = TypeVar("T")


class Runner:
    """`on_fatal` hears of an exception that leaves the ranks in an unknown state: the process must end."""

    def __init__(self, worker: Worker, on_fatal: Callable[[], None]) -> None:
        self._worker = worker
        self._on_fatal = on_fatal
        self._lock = asyncio.Lock()
        self._running: dict[Hashable, asyncio.Task[Any]] = {}
        ranks = worker.ranks
        self._thread = ThreadPoolExecutor(1, "rank0", initializer=lambda: devices.bind(ranks.device))

    @property
    def busy(self) -> bool:
        return bool(self._running)

    async def once(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a coroutine to its end even if the caller is gone; joins a running one of the same key."""
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(make())
            self._running[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        result: T = await asyncio.shield(task)
        return result

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Exclusive right to call commands."""
        async with self._lock:
            yield

    async def call(self, command: Command) -> Any:
        """Runs a command on all ranks; only inside a turn. Raises FlowfleetError where nothing has changed."""
        assert self._lock.locked()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._execute, command)
        except FlowfleetError:
            raise
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                log.critical(
                    "%s left the ranks in an unknown state; the trainer exits", command.kind.name, exc_info=error
                )
                termination.record(error)
                self._on_fatal()
            raise

    async def settled(self, timeout_s: float) -> bool:
        """Waits until nothing runs; False when it still does at the deadline."""
        if not self._running:
            return True
        _, pending = await asyncio.wait(list(self._running.values()), timeout=timeout_s)
        return not pending

    async def stop(self) -> None:
        """Ends the other ranks. Nothing may run."""
        async with self._lock:
            message = Command(Kind.STOP).to_bytes()
            await asyncio.get_running_loop().run_in_executor(self._thread, self._worker.ranks.broadcast, message)

    def _execute(self, command: Command) -> Any:
        self._worker.ranks.broadcast(command.to_bytes())
        return self._worker.execute(command)

    def _ended(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # the callers heard it, if any is left
