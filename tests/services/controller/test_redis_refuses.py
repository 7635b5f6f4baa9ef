"""A Redis that refuses writes, each way it can: REST answers 503 with the reason, jobs wait and lose nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions
from redis.asyncio import Redis

from flowfleet.api.jobs import JobStatus
from flowfleet.redis import trouble as redis_trouble
from flowfleet.redis.client import connect
from flowfleet.redis.server import RedisServer
from flowfleet.redis.trouble import patiently, trouble
from tests.services.controller.conftest import Api
from tests.services.controller.scripted import ScriptedReward, scripted_fleet
from tests.waiting import until

Job = Callable[..., dict[str, Any]]
Trouble = Callable[[Redis, Path], Awaitable[None]]


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A server of the test's own, for its settings change."""
    server = RedisServer(tmp_path / "redis")
    yield server.start()
    server.kill()


async def fill(redis: Redis, folder: Path) -> None:
    await redis.config_set("maxmemory", 1)


async def demote(redis: Redis, folder: Path) -> None:
    await redis.replicaof("127.0.0.1", "1")


async def want_replicas(redis: Redis, folder: Path) -> None:
    await redis.config_set("min-replicas-to-write", 1)


async def break_its_disk(redis: Redis, folder: Path) -> None:
    """It cannot save, and is asked to: a folder is where its file would be."""
    (folder / "redis" / "dump.rdb").mkdir()
    await redis.config_set("save", "3600 1")
    await redis.bgsave()
    while (await redis.info("persistence"))["rdb_last_bgsave_status"] != "err":
        await asyncio.sleep(0.02)


async def cure(redis: Redis) -> None:
    await redis.replicaof("NO", "ONE")
    await redis.config_set("save", "")
    await redis.config_set("min-replicas-to-write", 0)
    await redis.config_set("maxmemory", 0)


TROUBLES: dict[str, tuple[Trouble, str]] = {
    "full": (fill, redis_trouble.FULL),
    "read-only": (demote, redis_trouble.READ_ONLY),
    "too few replicas": (want_replicas, redis_trouble.TOO_FEW_REPLICAS),
    "cannot save": (break_its_disk, redis_trouble.CANNOT_SAVE),
}


@asynccontextmanager
async def troubled(redis_url: str, folder: Path, name: str) -> AsyncIterator[str]:
    """The trouble lasts while the block does. Gives the reason."""
    redis = connect(redis_url)
    try:
        cause, reason = TROUBLES[name]
        await cause(redis, folder)
        yield reason
    finally:
        await cure(redis)
        await redis.aclose()


@pytest.mark.parametrize("name", TROUBLES)
async def test_every_route_says_why_and_when_to_try_again(api: Api, job: Job, tmp_path: Path, name: str) -> None:
    job_id = (await api.submit(job()))["id"]
    url = f"/v1/jobs/{job_id}"
    shadow = {"revision": 0, "shadow": {"jpeg": {"beside": "ocr"}}}
    writes: list[tuple[str, str, Any]] = [("POST", f"{url}/{wish}", None) for wish in ("pause", "cancel")]
    writes += [("POST", "/v1/jobs", job(name="other"))]
    reads = ["/v1/jobs", url, f"{url}/events", f"{url}/metrics", f"{url}/checkpoints", f"{url}/samples"]
    reads += [f"{url}/rewards", "/v1/fleet", "/healthz", "/readyz", "/metrics"]
    async with troubled(api.services.settings.redis_url.get_secret_value(), tmp_path, name) as reason:
        for method, path, body in writes:
            response = await api.client.request(method, path, json=body)
            assert response.status_code == 503 or (name == "full" and path == "/v1/jobs"), (path, response.text)
            assert response.headers["content-type"] == "application/problem+json"
            assert int(response.headers["retry-after"]) > 0
            assert response.json()["detail"] == reason or response.status_code == 507  # above the watermark
        changed = await api.client.patch(f"{url}/rewards", json=shadow)
        assert changed.status_code in (409, 422, 503), changed.text
        for path in reads:
            assert (await api.client.get(path)).status_code == 200, path
    again = await api.client.post(f"{url}/pause")
    assert (again.status_code, again.json()["desired"]) == (202, "paused")


async def test_a_script_without_end_is_503_everywhere(api: Api, redis_url: str) -> None:
    redis, other = connect(redis_url), connect(redis_url)
    await redis.config_set("lua-time-limit", 1)
    script = asyncio.ensure_future(redis.eval("while true do end", 0))
    await asyncio.sleep(0.3)
    for path in ("/v1/jobs", "/v1/jobs/01a20091-df5f-7685-9395-c3a57230f852"):
        response = await api.client.get(path)
        assert (response.status_code, response.json().get("detail")) == (503, redis_trouble.BUSY)
        assert response.headers["retry-after"]
    await other.script_kill()
    with pytest.raises(exceptions.ResponseError):
        await script
    assert (await api.client.get("/v1/jobs")).status_code == 200
    await asyncio.gather(redis.aclose(), other.aclose())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "Redis is loading its data; try again"),
        (exceptions.MasterDownError("Link with MASTER is down"), redis_trouble.NO_PRIMARY),
        (exceptions.ResponseError("UNBLOCKED force unblock from blocking operation"), redis_trouble.READ_ONLY),
        (exceptions.ResponseError("OOM allow-oom flag is not set on the script"), redis_trouble.FULL),
        (exceptions.ResponseError("BUSYGROUP Consumer Group name already exists"), None),
        (exceptions.ResponseError("WRONGTYPE Operation against a key"), None),
    ],
)
async def test_errors_by_their_words(error: exceptions.RedisError, reason: str | None) -> None:
    assert trouble(error) == reason


async def test_a_write_waits_and_a_mistake_does_not(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts write blobs and references this way."""
    monkeypatch.setattr(redis_trouble, "RETRY_S", 0.02)
    redis = connect(redis_url)
    await redis.config_set("maxmemory", 1)
    writing = asyncio.ensure_future(patiently(lambda: redis.set("key", "value")))
    await asyncio.sleep(0.1)
    assert not writing.done()
    await redis.config_set("maxmemory", 0)
    await asyncio.wait_for(writing, 5)
    assert await redis.get("key") == b"value"
    with pytest.raises(exceptions.ResponseError, match="not an integer"):
        await patiently(lambda: redis.incr("key"))
    await redis.aclose()


# -- jobs that run ---------------------------------------------------------------------------------------------------


def by_index(sample: Any) -> float:
    return int(sample.sample_id.rpartition("/")[2]) / 4


@pytest.mark.parametrize(
    "name", [name if name == "full" else pytest.param(name, marks=pytest.mark.long) for name in TROUBLES]
)
async def test_a_running_job_waits_and_says_why_and_goes_on(redis_url: str, tmp_path: Path, name: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nb\n")
    job = {
        "model": {"path": str(tmp_path / "m")},
        "data": {"train": str(prompts)},
        "rewards": {"ocr": {}},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "batch_size": 4},
        "schedule": {"steps": 40, "save_every": 10, "keep_last": 1},
    }
    async with (
        scripted_fleet(redis_url, tmp_path / "state", {"ocr": ScriptedReward(by_index)}) as fleet,
        asyncio.timeout(60),
    ):
        record = await fleet.submit(job)
        await fleet.reached(record.id, lambda now: now.progress.step >= 3)
        async with troubled(redis_url, tmp_path, name) as reason:
            await until(lambda: fleet.runner.trouble == reason)
            assert fleet.runner.alive
            assert (await fleet.store.jobs.get(record.id)).status is JobStatus.RUNNING
        record = await fleet.succeeded(record.id)
        assert (record.progress.samples_trained, record.results["samples_dropped"]) == (160, {})
        await until(lambda: not fleet.runner.trouble)


async def test_rest_names_the_reason_where_it_cannot_be_stored(api: Api, job: Job) -> None:
    url = f"/v1/jobs/{(await api.submit(job()))['id']}"
    api.services.runner.trouble = redis_trouble.FULL  # type: ignore[misc]
    expected = f"the job waits: {redis_trouble.FULL}"
    assert (await api.client.get(url)).json()["reason"] == expected
    assert (await api.client.get("/v1/jobs")).json()["items"][0]["reason"] == expected
