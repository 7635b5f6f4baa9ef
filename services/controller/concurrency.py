"""Waiting for several things at once, all or nothing, ending what runs, and bounding it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

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
    made, is lost in it.
    """
    every = list(tasks)
    left = {task for task in every if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*every, return_exceptions=True)


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
