"""Waiting for several things at once, all or nothing, ending what runs, and bounding it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")

CANCEL_AGAIN_S = 0.5


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first failure cancels the others, waits for their end and is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await end(tasks)
        raise


async def end(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels tasks until they have ended; ignores their results.

    Once may not do: up to Python 3.11 a cancellation that meets the result of a `wait_for`, such as a connection being
    made, is lost in it. A cancellation of the caller is passed on at once, and raised when the tasks have ended.
    """
    every = list(tasks)
    cancelled: asyncio.CancelledError | None = None
    while left := {task for task in every if not task.done()}:
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
        except asyncio.CancelledError as error:
            cancelled = error
    await asyncio.gather(*every, return_exceptions=True)
    if cancelled is not None:
        raise cancelled


class Children:
    """Tasks that end together, for a parent that does no more than wait for them.

    `asyncio.TaskGroup` cancels its tasks once, and then waits whatever happens; these are ended by `end`.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def create_task(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Starts a child; a child may start others."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self) -> None:
        """Waits until all have ended. The first failure, which is raised as it is, and a cancellation end the others.
        A cancelled child is not a failure."""
        try:
            await self._over
        finally:
            await self._end_all()

    async def _end_all(self) -> None:
        """Ends all, and what these start meanwhile."""
        cancelled: asyncio.CancelledError | None = None
        while self._tasks:
            try:
                await end(self._tasks)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if self._over.done():
            if error is not None:
                log.warning("%s failed while it was being ended: %s: %s", task.get_name(), type(error).__name__, error)
        elif error is not None:
            self._over.set_exception(error)
        elif not self._tasks:
            self._over.set_result(None)


async def wait(event: asyncio.Event, timeout_s: float) -> None:
    """Waits for the event, no longer than that."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


class Budget:
    """Admits work while the sizes of what runs add up to `limit` at most, in the order in which it came; work that is
    larger runs alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Waits until there is room for work of this size, and frees it at the end."""
        async with self._turn:
            while self._taken and self._taken + size > self._limit:
                self._freed.clear()
                await self._freed.wait()
            self._taken += size
        try:
            yield
        finally:
            self._taken -= size
            self._freed.set()


class Changes:
    """Waits for conditions of what others change. All that wait are looked at in one go, `LOOK_S` after a change: to
    wake each of hundreds at every change takes an event loop for itself."""

    LOOK_S = 0.05

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._look_due = False

    def notify(self) -> None:
        """Says that something changed."""
        if self._waiting and not self._look_due:
            self._look_due = True
            asyncio.get_running_loop().call_later(self.LOOK_S, self._look)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition is true, which only a change makes so. Raises what the condition raises."""
        if condition():
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = condition
        try:
            await waiter
        finally:
            del self._waiting[waiter]

    def _look(self) -> None:
        self._look_due = False
        for waiter, condition in self._waiting.items():
            if waiter.done():
                continue
            try:
                if condition():
                    waiter.set_result(None)
            except Exception as error:  # of one waiter; the others are looked at all the same
                waiter.set_exception(error)
