"""Runs asynchronous calls for synchronous callers, on the event loop of one background thread per process.

`blocking` and `iterating` make a method of `Client` from one of `AsyncClient`; type checkers see the same parameters.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import cache, wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from flowfleet.client.asynchronous import AsyncClient

if TYPE_CHECKING:
    from flowfleet.client.client import Client

P = ParamSpec("P")
T = TypeVar("T")


def blocking(method: Callable[Concatenate[AsyncClient, P], Awaitable[T]]) -> Callable[Concatenate[Client, P], T]:
    @wraps(method)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return run(method(client.asynchronous, *args, **kwargs))

    return call


def iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[T]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    @wraps(method)
    def call(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return each(method(client.asynchronous, *args, **kwargs))

    return call


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
    threading.Thread(target=loop.run_forever, name="flowfleet-client", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=_loop.cache_clear)  # a fork has no thread but the one that forked
