"""Waits for what a test expects, instead of sleeping for as long as it may take."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout_s: float = 240.0, poll_s: float = 0.01) -> None:
    """Waits for a condition, a coroutine function as well. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(poll_s)


def wait_until(condition: Callable[[], object], timeout_s: float = 240.0, poll_s: float = 0.01) -> None:
    """Waits like `until`, for tests without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so within {timeout_s:g} s")
        time.sleep(poll_s)
