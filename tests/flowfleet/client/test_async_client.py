"""The asynchronous client against a real controller, and that the synchronous one is made of it."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from docs.generate import client as generator
from flowfleet.client import ApiError, AsyncClient
from flowfleet.client.types import JobStatus
from flowfleet.job.model_files import read_manifest
from services.controller.store.jobs import JobStore
from tests.flowfleet.conftest import IdleController
from tests.flowfleet.idle_controller import in_store, job_settings
from tests.models_on_disk import write_model

T = TypeVar("T")
WEIGHTS = bytes(range(256)) * 20_000


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


@pytest.mark.anyio
async def test_files_go_and_come(api_url: str, idle_controller: IdleController, tmp_path: Path) -> None:
    """A prompt file as an upload; a model, whole and once."""
    prompts = tmp_path / "mine.csv"
    prompts.write_text("prompt\na sign\n")
    async with AsyncClient(api_url) as client:
        place = await client.upload(prompts)
        digest = hashlib.sha256(b"prompt\na sign\n").hexdigest()
        assert place == f"upload:{digest}/mine.csv"
        job = await client.submit({**job_settings(tmp_path), "data": {"train": place}})
        write_model(idle_controller.state_dir / "jobs" / job.id / "model", job.id, 4, WEIGHTS)
        found = await client.download_model(job.id, tmp_path / "here")
        assert found == read_manifest(tmp_path / "here") == await client.download_model(job.id, tmp_path / "here")
    [weights] = (tmp_path / "here").rglob("*.safetensors")
    assert weights.read_bytes() == WEIGHTS
