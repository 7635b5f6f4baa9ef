"""Two racing calls: which one answers, what is raised, and that none is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest

from services.reward.judge.calls.race import Race
from tests.waiting import until


class Calls:
    """The first and the second call, as functions; which of them still run."""

    def __init__(self) -> None:
        self.running = 0
        self.seconds = 0

    async def run(self, call: Callable[[], Awaitable[str]]) -> str:
        self.running += 1
        try:
            return await call()
        finally:
            self.running -= 1

    def second(self, call: Callable[[], Awaitable[str]]) -> Coroutine[None, None, str]:
        self.seconds += 1
        return self.run(call)


def says(text: str, after_s: float = 0.0) -> Callable[[], Coroutine[None, None, str]]:
    async def call() -> str:
        await asyncio.sleep(after_s)
        return text

    return call


def fails(text: str, after_s: float = 0.0) -> Callable[[], Awaitable[str]]:
    async def call() -> str:
        await asyncio.sleep(after_s)
        raise OSError(text)

    return call


@pytest.mark.parametrize(
    ("first", "second", "expected", "won"),
    [
        (says("first"), says("second"), "first", None),
        (says("first", 0.2), says("second", 60), "first", False),
        (says("first", 60), says("second"), "second", True),
        (says("first", 0.2), fails("second"), "first", False),
        (fails("first", 0.2), says("second", 0.4), "second", True),
        (fails("first", 0.2), fails("second", 0.4), "! first", False),
        (fails("first"), says("second"), "! first", None),
    ],
)
def test_the_first_answer_counts(
    first: Callable[[], Awaitable[str]], second: Callable[[], Awaitable[str]], expected: str, won: bool | None
) -> None:
    async def body() -> None:
        calls = Calls()
        race = Race(calls.run(first), lambda: calls.second(second))
        try:
            found = await asyncio.wait_for(race.run(0.05), 30)
        except OSError as error:
            found = f"! {error}"
        assert found == expected
        assert (race.second_won if race.second else None) == won
        assert calls.running == 0

    asyncio.run(body())


@pytest.mark.parametrize("delay_s", [None, 0.05, 60.0])
def test_a_cancelled_race_leaves_nothing_running(delay_s: float | None) -> None:
    async def body() -> None:
        calls = Calls()
        race = Race(calls.run(says("", 60)), lambda: calls.second(says("", 60)))
        task = asyncio.create_task(race.run(delay_s))
        await until(lambda: calls.running == (2 if delay_s == 0.05 else 1))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert calls.running == 0

    asyncio.run(body())


def test_a_deadline_that_falls_together_with_the_second_answer_wins() -> None:
    async def body() -> None:
        calls = Calls()
        answered = asyncio.Event()

        async def second() -> str:
            await answered.wait()
            return "second"

        race = Race(calls.run(says("", 60)), lambda: calls.second(second))
        task = asyncio.create_task(race.run(0.01))
        while race.second is None:
            await asyncio.sleep(0.01)
        race.second.add_done_callback(lambda _: task.cancel())  # after the race's own callback, in the same turn
        answered.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert calls.running == 0

    asyncio.run(body())


def test_no_second_call_where_there_is_no_place_for_it() -> None:
    async def body() -> None:
        race = Race(says("first", 0.2)(), lambda: None)
        assert await race.run(0.01) == "first"
        assert race.second is None

    asyncio.run(body())
