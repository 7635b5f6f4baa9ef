"""A pause that ends by itself: when its cause is asked for, and what an answer means."""

import asyncio

import pytest
from redis.exceptions import ConnectionError as RedisGone

from services.controller.job import mending
from services.controller.job.mending import Mending


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "EVERY_S", 0.0)


async def asked(answer: bool | Exception) -> bool:
    """True if a job whose check answers so may be resumed."""

    async def check() -> bool:
        if isinstance(answer, Exception):
            raise answer
        return answer

    waits = Mending()
    waits.wait_for(check)
    assert not waits.is_over(), "it never waits for an answer"
    await asyncio.sleep(0.01)
    is_over = waits.is_over()
    await waits.close()
    return is_over


async def test_a_job_is_resumed_once_the_cause_is_gone() -> None:
    assert await asked(True)
    assert not await asked(False)
    assert not await asked(RedisGone()), "it cannot be known now"
    assert await asked(ValueError("a lost blob")), "the job says what is wrong itself"


async def test_its_user_ends_the_waiting() -> None:
    async def never() -> bool:
        return False

    waits = Mending()
    assert waits.is_over()
    waits.wait_for(never)
    assert not waits.is_over()
    waits.wait_for(None)
    assert waits.is_over()
    await waits.close()


async def test_an_answer_is_about_the_pause_that_asked_for_it() -> None:
    async def gone() -> bool:
        return True

    async def stays() -> bool:
        return False

    waits = Mending()
    waits.wait_for(gone)
    assert not waits.is_over()  # asked
    waits.wait_for(stays)
    for _ in range(3):
        await asyncio.sleep(0.01)
        assert not waits.is_over()
    await waits.close()
