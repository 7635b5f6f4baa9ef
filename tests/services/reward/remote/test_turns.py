"""Turns: in order, one in a turn of the event loop, and none lost to a cancelled one."""

from __future__ import annotations

import asyncio

from services.reward.remote.turns import Turns


async def test_what_follows_a_turn_comes_before_the_next_ones() -> None:
    """Each task takes a turn, then starts another that sends: as a request is sent by a task of its own."""
    turns, log = Turns(), list[str]()

    async def send(number: int) -> None:
        log.append(f"sent {number}")

    async def work(number: int) -> None:
        await turns.take()
        log.append(f"made {number}")
        await asyncio.create_task(send(number))

    await asyncio.gather(*(work(number) for number in range(4)))
    assert log == [f"{what} {number}" for number in range(4) for what in ("made", "sent")]


async def test_a_cancelled_one_holds_nobody_up() -> None:
    turns, log = Turns(), list[int]()

    async def work(number: int) -> None:
        await turns.take()
        log.append(number)

    tasks = [asyncio.create_task(work(number)) for number in range(5)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[4].cancel()
    await asyncio.wait(tasks, timeout=20)
    assert [task.cancelled() for task in tasks] == [False, True, False, False, True]
    await asyncio.wait_for(work(9), 20)
    assert log == [0, 2, 3, 9]
