"""A Redis that fills: submits are refused first, then running jobs pause, and every error says why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from redis.asyncio import Redis

from flowfleet.api.jobs import JobStatus
from flowfleet.errors import Full
from flowfleet.redis import keys
from flowfleet.redis.client import connect
from services.controller.job import mending
from services.controller.retention import keeper
from services.controller.retention.keep import Keep
from services.controller.retention.memory import Memory
from services.controller.settings import ControllerSettings
from services.controller.store import removal
from services.controller.store.events import MAX_NOTICES
from tests.services.controller.conftest import Api, serve
from tests.services.controller.scripted import ScriptedReward, scripted_fleet
from tests.waiting import until

Job = Callable[..., dict[str, Any]]
NOTHING_FITS = Keep(refuse_above=1e-9, pause_above=1e-9)
LITTLE_ROOM = Keep(refuse_above=1e-9)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.config_set("maxmemory", 0)
    await client.aclose()


async def test_above_the_watermark_a_submit_is_refused_in_words(settings: ControllerSettings, job: Job) -> None:
    async with serve(settings.model_copy(update={"keep": LITTLE_ROOM})) as api:
        response = await api.client.post("/v1/jobs", json=job())
        assert response.status_code == 507
        assert response.headers["retry-after"] == "60"
        assert response.headers["content-type"] == "application/problem+json"
        assert "flowfleet delete ID" in response.json()["detail"]
        assert await api.store.lists.page() == ([], None)


@pytest.mark.parametrize(
    ("info", "is_full"),
    [
        ({"used_memory": 9, "maxmemory": 10, "total_system_memory": 1000}, True),
        ({"used_memory": 9, "maxmemory": 0, "total_system_memory": 10}, True),
        ({"used_memory": 9, "maxmemory": 0}, False),
    ],
)
async def test_a_redis_that_tells_no_limit_is_never_full(info: dict[str, int], is_full: bool) -> None:
    redis = AsyncMock()
    redis.info.return_value = info
    if is_full:
        with pytest.raises(Full, match="uses 90% of its memory"):
            await Memory(redis, Keep()).check_room()
    else:
        await Memory(redis, Keep()).check_room()


async def test_a_submit_that_was_accepted_is_found_again_above_the_watermark(
    settings: ControllerSettings, job: Job
) -> None:
    async with serve(settings) as api:
        first = await api.submit(job(), **{"Idempotency-Key": "k"})
    async with serve(settings.model_copy(update={"keep": LITTLE_ROOM})) as api:
        assert (await api.submit(job(), **{"Idempotency-Key": "k"}))["id"] == first["id"]


async def test_a_full_redis_is_503_with_the_reason(api: Api, job: Job, redis: Redis) -> None:
    record = await api.submit(job())
    await redis.config_set("maxmemory", 1)
    for response in (
        await api.client.post(f"/v1/jobs/{record['id']}/pause"),
        await api.client.post("/v1/jobs", json=job(), headers={"Idempotency-Key": "k"}),
    ):
        assert response.status_code in (503, 507), response.text
        assert response.headers["content-type"] == "application/problem+json"
        assert response.headers["retry-after"]
    paused = await api.client.post(f"/v1/jobs/{record['id']}/pause")
    assert (paused.status_code, "Redis is full" in paused.json()["detail"]) == (503, True)
    assert (await api.client.get(f"/v1/jobs/{record['id']}")).json() == record


async def test_delete_over_rest(api: Api, job: Job) -> None:
    record = await api.submit(job(), **{"Idempotency-Key": "k"})
    url = f"/v1/jobs/{record['id']}"
    refused = await api.client.delete(url)
    assert (refused.status_code, "cancel it" in refused.json()["detail"]) == (409, True)
    await api.store.jobs.set_status(record["id"], JobStatus.CANCELLED)
    first = (await api.store.events.read(record["id"]))[0].id
    for _ in range(2):
        answer = await api.client.delete(url)
        assert (answer.status_code, answer.json()["desired"]) == (202, "deleted")
    await keeper.Keeper(api.store, api.services.blobs, Keep()).look()
    for path in (url, f"{url}/events", f"{url}/metrics"):
        gone = await api.client.get(path, headers={"Last-Event-ID": first})
        assert (gone.status_code, "was deleted" in gone.json()["detail"]) == (410, True)
    again = await api.client.post("/v1/jobs", json=job(), headers={"Idempotency-Key": "k"})
    assert (again.status_code, "use a new key" in again.json()["detail"]) == (409, True)
    assert (await api.client.get("/v1/jobs")).json()["items"] == []


async def test_a_trimmed_last_event_id_gets_a_named_gap_in_the_stream(api: Api, job: Job, redis: Redis) -> None:
    job_id = (await api.submit(job()))["id"]
    first = (await api.store.events.read(job_id))[0].id
    for step in range(3):
        await api.store.events.append(job_id, "phase", {"step": step})
    await api.store.jobs.set_status(job_id, JobStatus.CANCELLED)
    await redis.xtrim(keys.events(job_id), maxlen=2, approximate=False)
    headers = {"Accept": "text/event-stream", "Last-Event-ID": first}
    text = (await api.client.get(f"/v1/jobs/{job_id}/events", headers=headers)).text
    assert [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event:")] == [
        "gap", "phase", "status",
    ]  # fmt: skip
    assert f"events after {first} and before" in text


# -- jobs that run ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, Any]:
    """One step of two prompts x two samples."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n")
    return {
        "model": {"path": str(tmp_path / "m")},
        "data": {"train": str(prompts)},
        "rewards": {"ocr": {}},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "batch_size": 4},
        "schedule": {"steps": 1, "save_every": 1, "keep_last": 1},
    }


def by_index(sample: Any) -> float:
    return int(sample.sample_id.rpartition("/")[2]) / 4


async def test_running_jobs_pause_above_the_higher_watermark(
    redis_url: str, tmp_path: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mending, "EVERY_S", 0.1)
    async with scripted_fleet(
        redis_url, tmp_path / "state", {"ocr": ScriptedReward(by_index)}, keep=NOTHING_FITS
    ) as fleet:
        record = await fleet.submit(tiny)
        async with asyncio.timeout(20):
            record = await fleet.reached(record.id, lambda job: job.status is JobStatus.PAUSED)
        assert record.desired == "running"
        assert "running jobs pause" in record.reason
        assert "resumes by itself below 0%" in record.reason
        fleet.runner._memory._keep = fleet.runner._keeper._keep = Keep()  # somebody made room
        async with asyncio.timeout(20):
            record = await fleet.ended(record.id)
        assert (record.status, record.progress.samples_trained) == (JobStatus.SUCCEEDED, 4)


def ended(name: str) -> bool:
    return all(task.get_name() != name for task in asyncio.all_tasks())


async def soak(
    redis_url: str, folder: Path, job: dict[str, Any], *, jobs: int, first: int, keep: int
) -> list[tuple[int, int]]:
    """Runs simulated jobs one after the other. Number of keys, and their bytes, after the first and after all.

    Without the notices: their stream is cut at its own length, which it reaches later. Redis' own `used_memory` also
    counts buffers of connections, which differ by a tenth from one look to the next.
    """
    seen = []

    async def settled(fleet: Any) -> tuple[int, int]:
        await fleet.runner._keeper.look()
        assert await fleet.redis.xlen(keys.notices()) < 2 * MAX_NOTICES
        names = [name async for name in fleet.redis.scan_iter(count=1000)]
        sizes = [await fleet.redis.memory_usage(name, samples=0) for name in names if name != keys.notices().encode()]
        return len(names), sum(sizes)

    rewards = {"ocr": ScriptedReward(by_index)}
    async with scripted_fleet(redis_url, folder / "state", rewards, keep=Keep(jobs=keep)) as fleet:
        for number in range(1, jobs + 1):
            fleet.trainer.steps.clear()
            record = await fleet.run(job)
            if number in (first, jobs):
                await until(partial(ended, f"job {record.id}"))
                seen.append(await settled(fleet))
            elif number % keep == 0:  # it removes at most half of the jobs at once
                await fleet.runner._keeper.look()
        assert len(await fleet.store.removal.ended()) == keep
    return seen


async def test_redis_stops_growing(
    redis_url: str, tmp_path: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "PERIOD_S", 0.2)
    (few, _), (many, _) = await soak(redis_url, tmp_path, tiny, jobs=8, first=4, keep=2)
    assert many == few


@pytest.mark.long
async def test_after_200_jobs_redis_is_as_after_20(
    redis_url: str, tmp_path: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "LATE_S", 5.0)  # the second clearing of most jobs falls into the run
    (few, small), (many, large) = await soak(redis_url, tmp_path, tiny, jobs=200, first=20, keep=10)
    assert many == few
    assert abs(large - small) <= 0.05 * small
