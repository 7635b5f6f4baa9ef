"""The asynchronous client against a real controller, and how the synchronous one runs it."""

import asyncio
import hashlib
import inspect
import multiprocessing
import threading
from pathlib import Path

import pytest

from flowfleet.api.jobs import JobStatus
from flowfleet.client import ApiError, AsyncClient, Client
from flowfleet.job.model_files import read_manifest
from services.controller.store.store import Store
from tests.flowfleet.conftest import IdleController
from tests.flowfleet.idle_controller import job_settings, with_store
from tests.models_on_disk import write_model

WEIGHTS = bytes(range(256)) * 20_000


def test_the_synchronous_client_has_every_method_with_the_same_parameters() -> None:
    def methods(client: type) -> dict[str, list[inspect.Parameter]]:
        public = inspect.getmembers(client, lambda member: inspect.isfunction(member) or isinstance(member, property))
        return {
            name: [] if isinstance(member, property) else [*inspect.signature(member).parameters.values()]
            for name, member in public
            if not name.startswith("_")
        }

    wanted = methods(AsyncClient)
    wanted["close"] = wanted.pop("aclose")
    assert methods(Client) == wanted
    assert [*inspect.signature(Client).parameters] == [*inspect.signature(AsyncClient).parameters]


def test_an_iterator_that_is_left_early_ends_its_request(api_url: str, tmp_path: Path) -> None:
    with Client(api_url) as client:
        job = client.submit(job_settings(tmp_path))
        events = client.events(job.id)
        assert next(events).type == "status"
        del events  # its request would last until the job ends
        assert [one.id for one in client.jobs()] == [job.id]


def test_a_fork_has_a_client_of_its_own(api_url: str) -> None:
    with Client(api_url) as client:
        before = client.version()
    fork = multiprocessing.get_context("fork").Process(target=_version_is, args=(api_url, before))
    fork.start()
    fork.join(30)
    assert fork.exitcode == 0


def _version_is(url: str, expected: dict[str, str]) -> None:
    with Client(url) as client:
        assert client.version() == expected


def test_threads_share_a_client(api_url: str, tmp_path: Path) -> None:
    with Client(api_url) as client:
        threads = [
            threading.Thread(target=client.submit, args=(job_settings(tmp_path, seed=seed),)) for seed in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(client.job(job.id).spec["seed"] for job in client.jobs()) == [0, 1, 2, 3]


async def test_jobs_are_submitted_and_followed(api_url: str, redis_url: str, tmp_path: Path) -> None:
    async with AsyncClient(api_url) as client:
        assert await client.same_files
        first, second = await asyncio.gather(
            *(client.submit(job_settings(tmp_path, seed=seed, name=f"job-{seed}")) for seed in (1, 2))
        )
        assert (await client.find("job-1")).id == first.id
        assert {job.id async for job in client.jobs()} == {first.id, second.id}
        assert (await client.pause(second.id)).desired == "paused"
        assert (await client.change_rewards(first.id, set={"ocr": {"weight": 0.5}})).revision == 1

    async def play(store: Store) -> None:
        await store.history.put_metrics(first.id, 0, {"actor/loss": 0.5})
        await store.jobs.update_progress(first.id, step=1)
        await store.jobs.set_status(first.id, JobStatus.SUCCEEDED)

    await with_store(redis_url, play)
    async with AsyncClient(api_url) as client:
        assert (await client.wait(first.id)).status == "succeeded"
        assert [row.values async for row in client.metrics(first.id)] == [{"actor/loss": 0.5}]
        assert [event.type async for event in client.events(first.id)][-1] == "status"


async def test_mistakes_are_the_same_errors(api_url: str) -> None:
    async with AsyncClient(api_url) as client:
        with pytest.raises(ApiError, match="no job has the id or name 'ffff'"):
            await client.find("ffff")
    async with AsyncClient("http://127.0.0.1:9") as client:
        with pytest.raises(ApiError, match=r"no controller answers at http://127\.0\.0\.1:9"):
            await client.fleet()


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
