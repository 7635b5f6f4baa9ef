"""Runs asynchronous calls for synchronous callers, on the event loop of one background thread per process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from functools import cache
from typing import TypeVar

T = TypeVar("T")


def run(work: Awaitable[T]) -> T:
    """Waits for the result. An interrupt of the caller, such as Ctrl-C, cancels the work."""

    async def awaited() -> T:
        return await work

    future = asyncio.run_coroutine_threadsafe(awaited(), _loop())
    try:
        return future.result()
    finally:
        future.cancel()


def each(items: AsyncIterator[T]) -> Iterator[T]:
    """Yields the items, each asked for when the caller wants it."""
    try:
        while (item := run(anext(items, None))) is not None:
            yield item
    except GeneratorExit:
        # Not waited for: a forgotten iterator may be collected at exit, when the loop's thread no longer runs.
        asyncio.run_coroutine_threadsafe(_close(items), _loop())
        raise


async def _close(items: AsyncIterator[object]) -> None:
    await items.aclose()  # type: ignore[attr-defined]  # all are asynchronous generators


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="flowfleet-portal", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_loop.cache_clear)  # a fork has no thread but the one that forked
