"""Makes a call, and a second one in parallel if the first is late.

The first runs in the task that waits for it, so that the many calls that are not late cost neither a task nor a turn of
the event loop more than without: what comes back at once from many calls must not be passed on in step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


class Race(Generic[Answer]):
    """Run once. `second` is None while there is no second call."""

    def __init__(
        self, first: Coroutine[Any, Any, Answer], make_second: Callable[[], Coroutine[Any, Any, Answer] | None]
    ) -> None:
        """make_second: called once the first is late; None means no second call."""
        self._first = first
        self._make_second = make_second
        self._first_runs = True
        self.second: asyncio.Task[Answer] | None = None
        self.second_won = False

    async def run(self, delay_s: float | None) -> Answer:
        """The answer that comes first; the other call is cancelled. Where both fail, raises what the first raised.

        delay_s: after so long the first is late; None: never.
        """
        if delay_s is None:
            return await self._first
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(delay_s, self._late, task)
        cancelled_before = task.cancelling()
        try:
            return await self._first
        except asyncio.CancelledError:
            if not self.second_won or task.uncancel() > cancelled_before:
                raise
            assert self.second is not None
            return self.second.result()
        except Exception:
            self._first_runs = False
            if self.second is None:
                raise
            await asyncio.wait([self.second])
            if self.second.cancelled() or self.second.exception() is not None:
                raise
            self.second_won = True
            return self.second.result()
        finally:
            self._first_runs = False
            timer.cancel()
            await self._end_second()

    def _late(self, task: asyncio.Task[Any]) -> None:
        call = self._make_second() if self._first_runs else None
        if call is not None:
            self.second = asyncio.create_task(call)
            self.second.add_done_callback(lambda second: self._second_done(second, task))

    def _second_done(self, second: asyncio.Task[Answer], task: asyncio.Task[Any]) -> None:
        if self._first_runs and not second.cancelled() and second.exception() is None:
            self.second_won = True
            self._first_runs = False
            task.cancel()

    async def _end_second(self) -> None:
        if self.second is not None and not self.second.done():
            self.second.cancel()
            await asyncio.gather(self.second, return_exceptions=True)
