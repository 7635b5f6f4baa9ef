"""A job that holds or kills the controller is set aside with the reason, and the others continue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.jobs import quarantine
from services.controller.jobs.quarantine import STRIKES, WITHIN_S, Quarantine
from tests.services.controller.test_handover import Scene
from tests.waiting import until


@pytest.fixture
async def watch(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Quarantine, Any]]:
    for name, value in {"LOOK_S": 0.02, "MARK_S": 0.1, "STRIKE_S": 0.3, "END_S": 60.0}.items():
        monkeypatch.setattr(quarantine, name, value)
    redis = connect(redis_url)
    watch = Quarantine(redis, redis_url)
    await watch.start()
    yield watch, redis
    await watch.stop()
    asyncio.get_running_loop().set_task_factory(None)
    await redis.aclose()


async def hold(watch: Quarantine, job_id: str, seconds: float) -> None:
    """Holds like a task that the job's driver has started."""

    async def driver() -> None:
        if job_id:
            watch.drive(job_id)

        async def part() -> None:
            time.sleep(seconds)  # noqa: ASYNC251

        await asyncio.create_task(part())

    await asyncio.create_task(driver())
    await asyncio.sleep(0.2)  # the thread looks


async def test_who_holds_the_loop_for_long_has_a_strike(watch: tuple[Quarantine, Any]) -> None:
    quarantined, redis = watch
    await hold(quarantined, "short", 0.15)
    await hold(quarantined, "", 0.6)  # no job's task
    assert (quarantined.suspects(), await redis.exists(keys.driving())) == ([], 0)
    for number in range(STRIKES):
        assert await quarantined.reason("long") == ""
        await hold(quarantined, "long", 0.6)
        assert await redis.zcard(keys.strikes("long")) == number + 1
    assert quarantined.suspects() == ["long"]
    assert quarantined.suspects() == []
    reason = await quarantined.reason("long")
    assert reason.startswith("in quarantine: it stopped the controller 3 times, each within an hour of the one before")
    assert "last: its driver held" in reason
    assert WITHIN_S - 10 < await redis.ttl(keys.strikes("long")) <= WITHIN_S, "by the clock of Redis"


class Killed(Exception):
    """Leaves `opening` as a killed process does, once what it had written is put back."""


async def killed(watch: Quarantine, redis: Any, job_id: str) -> None:
    """The controller is killed while it opens the job, and another one takes over."""
    with suppress(Killed):
        async with watch.opening(job_id):
            suspicions = await redis.hgetall(keys.driving())
            raise Killed
    for _ in range(2):  # two controllers tell of one event
        await redis.hset(keys.driving(), mapping=suspicions)
        await watch.take_over()


async def test_a_job_whose_opening_kills_controllers_is_quarantined(watch: tuple[Quarantine, Any]) -> None:
    quarantined, redis = watch
    for number in range(STRIKES):
        assert await quarantined.reason("opened") == ""
        await killed(quarantined, redis, "opened")
        assert await redis.zcard(keys.strikes("opened")) == number + 1
        assert quarantined.suspects() == ["opened"]
    assert "the controller died while it opened the job" in await quarantined.reason("opened")
    await quarantined.forgive("opened")
    assert await quarantined.reason("opened") == ""


async def test_a_job_that_others_killed_the_controller_under_is_cleared_by_being_opened(
    watch: tuple[Quarantine, Any],
) -> None:
    quarantined, redis = watch
    await hold(quarantined, "healthy", 0.6)
    for _ in range(2 * STRIKES):
        await killed(quarantined, redis, "healthy")
        assert await redis.zcard(keys.strikes("healthy")) == 2
        async with quarantined.opening("healthy"):
            pass
        assert await redis.zcard(keys.strikes("healthy")) == 1, "that it held the loop stays"
        assert await quarantined.reason("healthy") == ""


async def test_a_controller_that_is_told_to_end_leaves_no_suspicion(watch: tuple[Quarantine, Any]) -> None:
    quarantined, redis = watch

    async def opens() -> None:
        async with quarantined.opening("opened"):
            await asyncio.Event().wait()

    task = asyncio.create_task(opens())
    await until(lambda: redis.exists(keys.driving()))
    task.cancel()
    await asyncio.wait([task])
    await quarantined.take_over()
    assert quarantined.suspects() == []


async def test_jobs_with_a_strike_are_opened_one_after_the_other(watch: tuple[Quarantine, Any]) -> None:
    quarantined, redis = watch
    for job_id in ("first", "second"):
        await killed(quarantined, redis, job_id)

    async def opens(job_id: str) -> list[bytes]:
        async with quarantined.opening(job_id):
            await asyncio.sleep(0.05)
            return list(await redis.hkeys(keys.driving()))

    assert await asyncio.gather(opens("first"), opens("second")) == [[b"first"], [b"second"]]
    both = await asyncio.gather(opens("first"), opens("second"))
    assert [sorted(seen) for seen in both] == [[b"first", b"second"]] * 2, "cleared"


class HoggedScene(Scene):
    module = "tests.services.controller.hogging_controller"


@pytest.mark.long
async def test_a_job_that_kills_controllers_is_quarantined_and_the_others_go_on(
    redis_url: str, tmp_path: Path, job: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hog = tmp_path / "hog"
    hog.touch()
    monkeypatch.setenv("FLOWFLEET_HOG", str(hog))
    scene = HoggedScene(redis_url, tmp_path)
    async with scene.running():

        async def ask(method: str, path: str, **given: Any) -> dict[str, Any]:
            """Asks whichever controller answers; restarts those that ended, like a supervisor."""
            async with asyncio.timeout(60):
                while True:
                    for number, controller in enumerate(scene.controllers):
                        if controller.process.poll() is not None:
                            scene.controllers[number] = controller = await scene.start()
                        try:
                            answer = await controller.client.request(method, path, timeout=2, **given)
                        except httpx.TransportError:
                            continue
                        assert answer.is_success, answer.text
                        found: dict[str, Any] = answer.json()
                        return found

        rollout = {"prompts_per_step": 2, "group_size": 4, "batch_size": 8}
        jobs = [job(name=name, rollout=rollout, schedule={"steps": 3}) for name in ("hog", "good")]
        first, second = [(await ask("POST", "/v1/jobs", json=one))["id"] for one in jobs]

        async def reached(job_id: str, status: str) -> dict[str, Any]:
            record: dict[str, Any] = {}

            async def has_status() -> bool:
                record.update(await ask("GET", f"/v1/jobs/{job_id}"))
                assert record["status"] not in ("failed", "cancelled"), record["reason"]
                return bool(record["status"] == status)

            await until(has_status, 90, 0.2)
            return record

        reason = (await reached(first, "quarantined"))["reason"]
        assert "it stopped the controller 3 times" in reason
        assert "last: its driver held the" in reason
        await reached(second, "succeeded")  # of the same pool
        assert (await ask("GET", f"/v1/jobs/{first}"))["desired"] == "paused"
        hog.unlink()
        scene.trainer.steps.clear()  # of the other job
        await ask("POST", f"/v1/jobs/{first}/resume")
        await reached(first, "succeeded")
