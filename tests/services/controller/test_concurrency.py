"""Ending what runs, however it takes the news."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from services.controller import concurrency
from services.controller.concurrency import Budget, Changes, Children, end, gather_or_cancel
from tests.waiting import until


async def stubborn() -> None:
    """Loses the first cancellation, as `asyncio.wait_for` of Python 3.11 may."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(60)


async def broken() -> None:
    await asyncio.sleep(0)
    raise ValueError("broken")


async def test_a_lost_cancellation_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "CANCEL_AGAIN_S", 0.01)
    tasks = [asyncio.create_task(part()) for part in (stubborn, broken, stubborn)]
    await until(lambda: tasks[1].done())
    await asyncio.wait_for(end(tasks), 5)
    assert [task.cancelled() for task in tasks] == [True, False, True]
    await end([])


async def test_the_first_failure_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "CANCEL_AGAIN_S", 0.01)
    with pytest.raises(ValueError, match="broken"):
        await asyncio.wait_for(gather_or_cancel([stubborn(), broken()]), 5)


async def test_children_started_while_others_end_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that loses a cancellation continues for a moment, and starts a job."""
    monkeypatch.setattr(concurrency, "CANCEL_AGAIN_S", 0.01)

    async def parent() -> None:
        children = Children()

        async def leader() -> None:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            children.create_task(asyncio.Event().wait(), name="late")
            await asyncio.Event().wait()

        children.create_task(leader(), name="leader")
        await children.wait()

    task = asyncio.create_task(parent())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.wait_for(end([task]), 5)
    assert task.cancelled()
    assert alive("late") == alive("leader") == []


async def family(*parts: Callable[[], Coroutine[Any, Any, None]]) -> None:
    children = Children()
    for part in parts:
        children.create_task(part(), name=part.__name__)
    await children.wait()


def alive(name: str) -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == name]


async def test_children_that_lose_a_cancellation_end_with_their_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three generations, of which the youngest does not hear the first cancellation; none is left behind."""
    monkeypatch.setattr(concurrency, "CANCEL_AGAIN_S", 0.01)

    async def parent() -> None:
        await family(stubborn, stubborn)

    task = asyncio.create_task(family(parent, stubborn))
    await until(lambda: len(alive("stubborn")) == 3)
    await asyncio.wait_for(end([task]), 5)
    assert task.cancelled()
    assert alive("stubborn") == []


async def test_a_child_that_fails_ends_the_others_and_one_that_returns_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(concurrency, "CANCEL_AGAIN_S", 0.01)
    with pytest.raises(ValueError, match="broken"):
        await asyncio.wait_for(family(stubborn, broken), 5)
    assert alive("stubborn") == []

    async def short() -> None:
        await asyncio.sleep(0)

    async def long() -> None:
        await asyncio.sleep(0.05)
        finished.append("long")

    finished = list[str]()
    await asyncio.wait_for(family(short, long), 5)
    assert finished == ["long"]


async def test_children_may_start_children_and_one_that_is_cancelled_is_no_failure() -> None:
    children, started = Children(), list[asyncio.Task[None]]()

    async def starts() -> None:
        started.append(children.create_task(asyncio.sleep(60), name="late"))
        await asyncio.sleep(0)
        await end(started)

    children.create_task(starts(), name="starts")
    await asyncio.wait_for(children.wait(), 5)
    assert [task.cancelled() for task in started] == [True]


async def test_ending_is_finished_though_its_caller_is_cancelled_and_then_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(concurrency, "CANCEL_AGAIN_S", 60.0)
    slow = asyncio.create_task(stubborn())
    await asyncio.sleep(0)  # it begins
    ending = asyncio.create_task(end([slow]))
    await until(slow.cancelling)
    assert not slow.done()
    ending.cancel()  # passed on: the task's second cancellation
    await asyncio.wait({ending}, timeout=5)
    assert slow.cancelled()
    assert ending.cancelled()


async def test_a_budget_admits_in_order_what_fits() -> None:
    budget, running, gates = Budget(10), list[str](), {name: asyncio.Event() for name in "abcdef"}

    async def work(name: str, size: int) -> None:
        async with budget.take(size):
            running.append(name)
            try:
                await gates[name].wait()
            finally:
                running.remove(name)

    async def settled() -> str:
        for _ in range(10):
            await asyncio.sleep(0)
        return "".join(running)

    sizes = {"a": 6, "b": 4, "c": 3, "d": 25, "e": 1, "f": 9}
    tasks = {name: asyncio.create_task(work(name, size)) for name, size in sizes.items()}
    assert await settled() == "ab"
    gates["b"].set()
    assert await settled() == "ac"  # d is larger than all, and e does not pass it
    tasks["a"].cancel()
    assert await settled() == "c"
    gates["c"].set()
    assert await settled() == "d"
    gates["d"].set()
    assert await settled() == "ef"
    for gate in gates.values():
        gate.set()
    await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 5)


async def test_who_leaves_the_queue_of_a_budget_takes_nothing() -> None:
    budget = Budget(1)
    async with budget.take(1):
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01), budget.take(1):
                    pass
    async with asyncio.timeout(5), budget.take(1):
        pass


async def test_conditions_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred changes at once cost each waiter one look; the one that fails fails alone."""
    monkeypatch.setattr(Changes, "LOOK_S", 0.01)
    seen = {"value": 0, "looks": 0}

    def at_least(value: int) -> bool:
        seen["looks"] += 1
        return seen["value"] >= value

    def refuses() -> bool:
        if seen["value"]:
            raise ValueError("no such step")
        return False

    changes = Changes()
    await changes.until(lambda: True)
    low, high, failing = (
        asyncio.create_task(changes.until(condition))
        for condition in (lambda: at_least(100), lambda: at_least(101), refuses)
    )
    await asyncio.sleep(0)
    for _ in range(100):
        seen["value"] += 1
        changes.notify()
    await asyncio.wait_for(low, 5)
    with pytest.raises(ValueError, match="no such step"):
        await failing
    assert not high.done()
    assert seen["looks"] == 4
    high.cancel()
    await end([high])
    changes.notify()  # no task waits
    seen["value"] += 1
    late = asyncio.create_task(changes.until(lambda: at_least(102)))
    await asyncio.sleep(0)
    seen["value"] += 1
    changes.notify()
    await asyncio.wait_for(late, 5)
