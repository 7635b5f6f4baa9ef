"""vLLM-Omni's `AsyncOmni` on an event loop of its own, in a thread of this process.

Its constructor and its shutdown block for seconds, and its tasks belong to the loop that it was first used on; neither
may touch the loop that serves calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a thread until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Runs it there; the future is of the caller's loop. Cancelling the future cancels the coroutine."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Calls it there, blocking that loop."""

        async def run() -> T:
            return function()

        return self.submit(run())

    def close(self) -> None:
        """Ends the loop and waits for the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
