"""Dynamic micro-batching: waiting requests with equal keys are run as one batch, one batch or a few at a time.

A batch starts when it is full or when its oldest request has waited `max_wait_s`, whichever is first; requests that
arrive while as many batches run as may gather meanwhile. The oldest request is always in the next batch; a younger one
that fits may overtake one that does not. A request is never split, so a group stays together. The queue is
bounded in samples and bytes: beyond, `submit` raises `QueueFull`. A request whose caller has gone (cancelled, deadline
passed) leaves the queue.
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from flowfleet.errors import TooLarge, Unavailable

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class QueueFull(TooLarge):
    """RESOURCE_EXHAUSTED: more is waiting than the service may hold."""


@dataclass(frozen=True)
class Limits:
    """`max_batch` and `max_queued` count samples; `max_queued_bytes` bounds what waits in memory."""

    max_batch: int = 64
    max_wait_s: float = 0.0
    max_queued: int = 8192
    max_queued_bytes: int = 2**30


def draining() -> Unavailable:
    """Returns the error of every call once the service drains."""
    return Unavailable("the service is draining: ask another replica, or try again")


def queue_full(num_samples: int, num_bytes: int, limits: Limits) -> QueueFull:
    """Rejection of a call that does not fit with so many samples and bytes."""
    return QueueFull(
        f"{num_samples} samples ({num_bytes} bytes) wait already, the limit is {limits.max_queued} "
        f"({limits.max_queued_bytes} bytes): send fewer at a time, or start more replicas"
    )


@dataclass(eq=False)
class _Ticket(Generic[Item, Key, Result]):
    items: Sequence[Item]
    key: Key
    num_bytes: int
    arrived: float
    done: asyncio.Future[list[Result]]


class MicroBatcher(Generic[Item, Key, Result]):
    """Calls `run(items, key)` in `num_batches` worker threads: one result an item. `start` it in the event loop;
    `drain` ends it."""

    def __init__(self, run: Callable[[list[Item], Key], list[Result]], limits: Limits, num_batches: int = 1) -> None:
        self._run = run
        self._limits = limits
        self._waiting: list[_Ticket[Item, Key, Result]] = []
        self._changed = asyncio.Event()
        self._closing = False
        self._num_batches = num_batches
        self._running: set[asyncio.Task[None]] = set()
        self._workers = ThreadPoolExecutor(num_batches, thread_name_prefix="score")
        self._task: asyncio.Task[None] | None = None

    @property
    def num_queued(self) -> int:
        """Samples that wait."""
        return sum(len(ticket.items) for ticket in self._waiting)

    def start(self) -> None:
        self._task = asyncio.create_task(self._serve(), name="micro-batcher")

    async def submit(self, items: Sequence[Item], key: Key, num_bytes: int = 0) -> list[Result]:
        """The results of `items`, at most `max_batch` of them, in order. QueueFull; Unavailable while draining."""
        assert 0 < len(items) <= self._limits.max_batch, "the caller checks the size of a request"
        self._admit(len(items), num_bytes)
        loop = asyncio.get_running_loop()
        ticket = _Ticket[Item, Key, Result](items, key, num_bytes, loop.time(), loop.create_future())
        self._waiting.append(ticket)
        self._changed.set()
        try:
            return await ticket.done
        finally:
            if ticket in self._waiting:
                self._waiting.remove(ticket)

    async def drain(self) -> None:
        """Admits nothing more, finishes what was admitted, and stops."""
        self._closing = True
        self._changed.set()
        if self._task is not None:
            await self._task
        self._workers.shutdown()

    def _admit(self, num_items: int, num_bytes: int) -> None:
        if self._closing:
            raise draining()
        limits = self._limits
        queued_bytes = sum(ticket.num_bytes for ticket in self._waiting)
        if self.num_queued + num_items > limits.max_queued or queued_bytes + num_bytes > limits.max_queued_bytes:
            raise queue_full(self.num_queued, queued_bytes, limits)

    async def _serve(self) -> None:
        while self._waiting or not self._closing:
            if len(self._running) == self._num_batches:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                continue
            batch = self._next_batch()
            wait_s = self._wait_s(batch)
            if wait_s is None or wait_s > 0.0:
                await self._sleep(wait_s)
            else:
                self._begin(batch)
        await asyncio.gather(*self._running)

    def _next_batch(self) -> list[_Ticket[Item, Key, Result]]:
        """Oldest request and those of its key that fit with it, still in the queue."""
        batch: list[_Ticket[Item, Key, Result]] = []
        room = self._limits.max_batch
        for ticket in self._waiting:
            if ticket.key == self._waiting[0].key and len(ticket.items) <= room:
                batch.append(ticket)
                room -= len(ticket.items)
        return batch

    def _wait_s(self, batch: Sequence[_Ticket[Item, Key, Result]]) -> float | None:
        """How long the batch may still grow; None: there is nothing to do."""
        if not batch:
            return None
        full = sum(len(ticket.items) for ticket in batch) >= self._limits.max_batch
        passed_over = any(ticket.key == batch[0].key and ticket not in batch for ticket in self._waiting)
        if full or passed_over or self._closing:
            return 0.0
        return batch[0].arrived + self._limits.max_wait_s - asyncio.get_running_loop().time()

    async def _sleep(self, seconds: float | None) -> None:
        """Waits until a request arrives or leaves, at most so long."""
        self._changed.clear()
        if seconds is None:
            await self._changed.wait()
            return
        timer = asyncio.get_running_loop().call_later(seconds, self._changed.set)
        await self._changed.wait()
        timer.cancel()

    def _begin(self, batch: Sequence[_Ticket[Item, Key, Result]]) -> None:
        self._waiting = [ticket for ticket in self._waiting if ticket not in batch]
        task = asyncio.create_task(self._process(batch))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _process(self, batch: Sequence[_Ticket[Item, Key, Result]]) -> None:
        items = [item for ticket in batch for item in ticket.items]
        loop = asyncio.get_running_loop()
        try:
            results = iter(await loop.run_in_executor(self._workers, self._run, items, batch[0].key))
        except Exception as error:
            for ticket in batch:
                if not ticket.done.done():
                    ticket.done.set_exception(error)
            return
        for ticket in batch:
            part = [next(results) for _ in ticket.items]
            if not ticket.done.done():
                ticket.done.set_result(part)
