"""The asynchronous client against a real controller, and that the synchronous one is made of it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from docs.generate import client as generator
from flowfleet.client import ApiError, AsyncClient
from flowfleet.client.types import JobStatus
from services.controller.store.jobs import JobStore
from tests.flowfleet.idle_controller import in_store, job_settings

T = TypeVar("T")


@pytest.mark.parametrize("name", generator.NAMES)
def test_the_synchronous_client_is_up_to_date(name: str) -> None:
    assert (generator.FOLDER / name).read_text() == generator.synchronous(name), "run `make docs`"


def asked(url: str, what: Callable[[AsyncClient], Awaitable[T]]) -> T:
    async def main() -> T:
        async with AsyncClient(url) as client:
            return await what(client)

    return asyncio.run(main())


def test_jobs_are_submitted_and_followed(api_url: str, redis_url: str, tmp_path: Path) -> None:
    async def submit(client: AsyncClient) -> str:
        assert await client.same_files
        first, second = await asyncio.gather(
            *(client.submit(job_settings(tmp_path, seed=seed, name=f"job-{seed}")) for seed in (1, 2))
        )
        assert (await client.find("job-1")).id == first.id
        assert {job.id async for job in client.jobs()} == {first.id, second.id}
        assert (await client.pause(second.id)).desired == "paused"
        assert (await client.change_rewards(first.id, set={"ocr": {"weight": 0.5}})).revision == 1
        return first.id

    job_id = asked(api_url, submit)

    async def play(store: JobStore) -> None:
        await store.metrics_put(job_id, 0, {"actor/loss": 0.5})
        await store.update_progress(job_id, step=1)
        await store.set_status(job_id, JobStatus.SUCCEEDED)

    in_store(redis_url, play)

    async def follow(client: AsyncClient) -> list[str]:
        assert (await client.wait(job_id)).status == "succeeded"
        assert [row.values async for row in client.metrics(job_id)] == [{"actor/loss": 0.5}]
        return [event.type async for event in client.events(job_id)]

    assert asked(api_url, follow)[-1] == "status"


def test_mistakes_are_the_same_errors(api_url: str) -> None:
    with pytest.raises(ApiError, match="no job has the id or name 'ffff'"):
        asked(api_url, lambda client: client.find("ffff"))
    with pytest.raises(ApiError, match=r"no controller answers at http://127\.0\.0\.1:9"):
        asked("http://127.0.0.1:9", lambda client: client.fleet())
