from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flowfleet.errors import Unavailable
from services.reward.execution.batcher import Limits, MicroBatcher, QueueFull
from tests.waiting import until

Batcher = MicroBatcher[int, str, int]


class Work:
    """Negates; keeps its batches; waits for `gate`; raises for the key "bad"."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[int]]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, items: list[int], key: str) -> list[int]:
        self.batches.append((key, items))
        assert self.gate.wait(10)
        if key == "bad":
            raise ZeroDivisionError
        return [-item for item in items]


@asynccontextmanager
async def running(limits: Limits, num_batches: int = 1) -> AsyncIterator[tuple[Batcher, Work]]:
    work = Work()
    batcher = Batcher(work, limits, num_batches)
    batcher.start()
    try:
        async with asyncio.timeout(10):
            yield batcher, work
    finally:
        work.gate.set()
        await batcher.drain()


async def occupied(batcher: Batcher, work: Work, num_items: int = 1) -> asyncio.Task[list[int]]:
    """Closes the gate and lets one request into the worker, so that later ones queue."""
    work.gate.clear()
    task = asyncio.create_task(batcher.submit([0] * num_items, "first"))
    await until(lambda: work.batches)
    return task


async def queued(batcher: Batcher, work: Work, *requests: tuple[Sequence[int], str]) -> list[asyncio.Task[list[int]]]:
    """Returns once the batcher has the requests, in its queue or at work."""

    def admitted() -> int:
        return batcher.num_queued + sum(len(items) for _, items in work.batches)

    expected = admitted() + sum(len(items) for items, _ in requests)
    tasks = [asyncio.create_task(batcher.submit(items, key)) for items, key in requests]
    await until(lambda: admitted() == expected)
    return tasks


async def released(work: Work, *tasks: Awaitable[list[int]]) -> list[Any]:
    work.gate.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_waiting_requests_of_one_key_share_a_batch_and_get_their_own_results() -> None:
    async with running(Limits(max_batch=8)) as (batcher, work):
        first = await occupied(batcher, work)
        tasks = await queued(batcher, work, ([1, 2], "a"), ([3], "b"), ([4], "a"))
        assert batcher.num_queued == 4
        assert await released(work, first, *tasks) == [[0], [-1, -2], [-3], [-4]]
    assert work.batches == [("first", [0]), ("a", [1, 2, 4]), ("b", [3])]


async def test_requests_that_arrive_within_the_wait_are_merged() -> None:
    async with running(Limits(max_batch=8, max_wait_s=0.1)) as (batcher, work):
        start = time.monotonic()
        tasks = [asyncio.create_task(batcher.submit([item], "a")) for item in (1, 2, 3)]
        assert await asyncio.gather(*tasks) == [[-1], [-2], [-3]]
        assert time.monotonic() - start >= 0.1
    assert work.batches == [("a", [1, 2, 3])]


async def test_a_full_batch_does_not_wait() -> None:
    async with running(Limits(max_batch=3, max_wait_s=60.0)) as (batcher, work):
        assert await batcher.submit([1, 2, 3], "a") == [-1, -2, -3]
    assert work.batches == [("a", [1, 2, 3])]


async def test_requests_are_not_split_and_small_ones_fill_up() -> None:
    async with running(Limits(max_batch=4, max_wait_s=60.0)) as (batcher, work):
        first = await occupied(batcher, work, 4)
        tasks = await queued(batcher, work, ([1, 2, 3], "a"), ([4, 5], "a"), ([6], "a"), ([7, 8], "a"))
        await released(work, first, *tasks)
    assert work.batches[1:] == [("a", [1, 2, 3, 6]), ("a", [4, 5, 7, 8])]


async def test_a_batch_that_leaves_one_of_its_key_behind_does_not_wait() -> None:
    async with running(Limits(max_batch=4, max_wait_s=60.0)) as (batcher, work):
        first = await occupied(batcher, work, 4)
        small, large = await queued(batcher, work, ([1], "a"), ([2, 3, 4, 5], "a"))
        assert await released(work, first, small, large) == [[0] * 4, [-1], [-2, -3, -4, -5]]


@pytest.mark.parametrize("limits", [Limits(max_queued=3), Limits(max_queued_bytes=300)])
async def test_the_queue_is_bounded(limits: Limits) -> None:
    async with running(limits) as (batcher, work):
        first = await occupied(batcher, work)
        second = asyncio.create_task(batcher.submit([1, 2], "a", 200))
        await until(lambda: batcher.num_queued == 2)
        with pytest.raises(QueueFull, match="send fewer at a time"):
            await batcher.submit([3, 4], "a", 200)
        assert await released(work, first, second) == [[0], [-1, -2]]
        assert await batcher.submit([3, 4], "a", 200) == [-3, -4]


async def test_a_cancelled_request_leaves_the_queue() -> None:
    async with running(Limits()) as (batcher, work):
        first = await occupied(batcher, work)
        gone, stays = await queued(batcher, work, ([1, 2], "a"), ([3], "a"))
        gone.cancel()
        await until(lambda: batcher.num_queued == 1)
        assert await released(work, first, stays) == [[0], [-3]]
    assert work.batches[1:] == [("a", [3])]


async def test_a_request_cancelled_while_it_runs_harms_no_other() -> None:
    async with running(Limits()) as (batcher, work):
        first = await occupied(batcher, work)
        first.cancel()
        (second,) = await queued(batcher, work, ([1], "a"))
        assert await released(work, second) == [[-1]]


async def test_a_failure_reaches_the_callers_of_its_batch_only() -> None:
    async with running(Limits()) as (batcher, work):
        first = await occupied(batcher, work)
        tasks = await queued(batcher, work, ([1], "bad"), ([2], "good"), ([3], "bad"))
        results = await released(work, first, *tasks)
        assert [type(result) for result in results] == [list, ZeroDivisionError, list, ZeroDivisionError]


async def test_draining_finishes_what_waits_and_admits_nothing_more() -> None:
    async with running(Limits(max_batch=4, max_wait_s=60.0)) as (batcher, work):
        first = await occupied(batcher, work, 4)
        (second,) = await queued(batcher, work, ([1], "a"))
        draining = asyncio.create_task(batcher.drain())
        await until(lambda: batcher._closing)
        with pytest.raises(Unavailable, match="draining"):
            await batcher.submit([2], "a")
        assert await released(work, first, second) == [[0] * 4, [-1]]
        await draining


async def test_as_many_batches_run_at_once_as_may() -> None:
    async with running(Limits(max_wait_s=0.0), num_batches=2) as (batcher, work):
        first = await occupied(batcher, work)
        tasks = await queued(batcher, work, ([1], "a"))
        await until(lambda: len(work.batches) == 2)
        tasks += await queued(batcher, work, ([2], "a"), ([3], "a"))
        assert [items for _, items in work.batches] == [[0], [1]]
        assert batcher.num_queued == 2
        assert await released(work, first, *tasks) == [[0], [-1], [-2], [-3]]
    assert work.batches[2:] == [("a", [2, 3])]


async def test_draining_waits_for_every_batch_that_runs() -> None:
    async with running(Limits(max_wait_s=0.0), num_batches=2) as (batcher, work):
        first = await occupied(batcher, work)
        (second,) = await queued(batcher, work, ([1], "a"))
        draining = asyncio.create_task(batcher.drain())
        await asyncio.sleep(0.01)
        assert not draining.done()
        assert await released(work, first, second) == [[0], [-1]]
        await draining
