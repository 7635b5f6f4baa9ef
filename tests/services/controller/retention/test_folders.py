"""Files of removed jobs: they go when their user says so, or after a while; what a job starts from stays."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from prometheus_client import CollectorRegistry

from flowfleet.api.jobs import JobStatus
from flowfleet.data.blobs import BlobStore
from flowfleet.errors import NotFound
from flowfleet.redis import keys
from services.controller.prompts.uploads import SWEEP_EVERY_S
from services.controller.retention.folders import Folders
from services.controller.retention.keep import DAY_S, MAX_SKEW_S, Keep
from services.controller.retention.keeper import Keeper
from services.controller.store.store import Store
from tests.services.controller.conftest import Api
from tests.services.controller.retention.conftest import Clock, spec


def with_files(state: Path, job_id: str) -> Path:
    """A job's folder and all else that it leaves on disk."""
    folder = state / "jobs" / job_id
    (folder / "checkpoints/step-00000001").mkdir(parents=True)
    (folder / "checkpoints/step-00000001/shard.safetensors").write_bytes(b"x" * 10_000)
    for name in (f"trainers/{job_id}.words", f"trainers/{job_id}.port", f"logs/trainer-{job_id}.log"):
        (state / name).parent.mkdir(exist_ok=True)
        (state / name).write_text("x")
    return folder


async def ended_job(store: Store, **parts: Any) -> str:
    job_id = (await store.jobs.create(spec().model_copy(update=parts)))[0].id
    await store.jobs.set_status(job_id, JobStatus.SUCCEEDED)
    return job_id


def files_of(state: Path, job_id: str) -> list[Path]:
    return [path for path in state.rglob("*") if job_id in str(path)]


@pytest.mark.parametrize("files", [False, True])
async def test_files_go_with_their_job_if_its_user_says_so(
    store: Store, blobs: BlobStore, clock: Clock, tmp_path: Path, files: bool
) -> None:
    job_id, other = await ended_job(store), await ended_job(store)
    with_files(tmp_path, job_id), with_files(tmp_path, other)
    await store.jobs.request(job_id, "delete")
    if files:
        await store.jobs.request(job_id, "delete", files=True)  # said later
    folders = Folders(tmp_path, CollectorRegistry())
    await Keeper(store, blobs, Keep(), folders=folders, clock=clock).look()
    with pytest.raises(NotFound):
        await store.jobs.get(job_id)
    assert bool(files_of(tmp_path, job_id)) is not files
    assert len(files_of(tmp_path, other)) == 7


@pytest.mark.parametrize("naming", ["job:{id}", "job:{id}@1", "{state}/jobs/{id}/checkpoints/step-00000001"])
async def test_files_that_another_job_starts_from_stay_until_it_has_ended(
    store: Store, blobs: BlobStore, clock: Clock, tmp_path: Path, naming: str
) -> None:
    job_id = await ended_job(store)
    folder = with_files(tmp_path, job_id)
    trainer = spec().trainer.model_copy(update={"resume": naming.format(id=job_id, state=tmp_path)})
    user, _ = await store.jobs.create(spec().model_copy(update={"trainer": trainer}))
    await store.jobs.request(job_id, "delete", files=True)
    keeper = Keeper(store, blobs, Keep(), folders=Folders(tmp_path, CollectorRegistry()), clock=clock)
    await keeper.look()
    assert folder.exists()
    await store.jobs.set_status(user.id, JobStatus.CANCELLED)
    await keeper.look()
    assert not folder.exists()


async def test_folders_of_removed_jobs_go_after_the_days_that_controllers_have_seen_them(
    store: Store, blobs: BlobStore, clock: Clock, tmp_path: Path
) -> None:
    kept, gone = await ended_job(store), await ended_job(store)
    await store.removal.remove(gone, "was deleted")
    folders = [with_files(tmp_path, job_id) for job_id in (kept, gone)]
    places = Folders(tmp_path, CollectorRegistry())
    keep = Keep(days=1e6, folder_days=2 * SWEEP_EVERY_S / DAY_S)
    for _ in range(5):  # controllers that start again and again have seen it for no time
        await Keeper(store, blobs, keep, folders=places, clock=clock).look()
    keeper = Keeper(store, blobs, keep, folders=places, clock=clock)
    for passed in (0.0, 1000 * DAY_S, 10.0, SWEEP_EVERY_S):  # the clock jumps: that is one look and no more
        clock.now += passed
        await keeper.look()
        assert [folder.exists() for folder in folders] == [True, True]
    clock.now += SWEEP_EVERY_S
    await keeper.look()
    assert [folder.exists() for folder in folders] == [True, False]


@pytest.mark.parametrize("name", [".snapshot", "lost+found", "backup", "*", "01a20091-df5f-7685-9395-c3a57230f852"])
async def test_a_folder_stays_that_is_not_of_a_job_that_this_redis_removed(
    store: Store, blobs: BlobStore, redis: Any, clock: Clock, tmp_path: Path, name: str
) -> None:
    """Names that are no job's, and a job of another Redis, or of one that was lost."""
    folder, keep = with_files(tmp_path, name), Keep(folder_days=SWEEP_EVERY_S / DAY_S)
    other = tmp_path / "trainers/other.port"
    other.write_text("x")
    if name == "*":
        await redis.hset(keys.removed(), name, 1e9)
    keeper = Keeper(store, blobs, keep, folders=Folders(tmp_path, CollectorRegistry()), clock=clock)
    for _ in range(5):
        await keeper.look()
        clock.now += SWEEP_EVERY_S
    assert folder.exists()
    assert other.exists()


async def test_folders_stay_while_retention_is_held(
    store: Store, blobs: BlobStore, clock: Clock, tmp_path: Path
) -> None:
    gone, off_s = await ended_job(store), [2 * MAX_SKEW_S]
    await store.removal.remove(gone, "was deleted")
    folder, keep = with_files(tmp_path, gone), Keep(folder_days=SWEEP_EVERY_S / DAY_S)
    places = Folders(tmp_path, CollectorRegistry())
    keeper = Keeper(store, blobs, keep, folders=places, clock=lambda: clock.now + off_s[0])
    for _ in range(5):
        await keeper.look()
        clock.now += SWEEP_EVERY_S
    assert folder.exists()
    off_s[0] = 0.0
    for _ in range(3):
        await keeper.look()
        clock.now += SWEEP_EVERY_S
    assert not folder.exists()


async def test_without_a_limit_folders_stay(store: Store, blobs: BlobStore, clock: Clock, tmp_path: Path) -> None:
    folder = with_files(tmp_path, "removed")
    keeper = Keeper(store, blobs, Keep(), folders=Folders(tmp_path, CollectorRegistry()), clock=clock)
    for _ in range(3):
        await keeper.look()
        clock.now += 1000 * DAY_S
    assert folder.exists()


async def test_a_sweep_that_fails_leaves_the_others_their_turn(
    store: Store, blobs: BlobStore, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, uploads = CollectorRegistry(), Mock()
    uploads.expired.return_value = False
    with_files(tmp_path, "a")
    monkeypatch.setattr(blobs, "sweep", AsyncMock(side_effect=RuntimeError("NoCredentials")))
    folders = Folders(tmp_path, registry)
    await Keeper(store, blobs, Keep(), folders=folders, uploads=uploads, clock=clock).look()
    assert uploads.expired.called
    assert registry.get_sample_value("flowfleet_state_bytes", {"part": "jobs"})


def test_the_metric_stays_while_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, seen = CollectorRegistry(), []
    with_files(tmp_path, "a")
    folders = Folders(tmp_path, registry)
    folders.measure()
    shutil.rmtree(tmp_path / "logs")
    walk = os.walk

    def noted(folder: Path) -> Any:
        seen.append(registry.get_sample_value("flowfleet_state_bytes", {"part": "logs"}))
        return walk(folder)

    monkeypatch.setattr(os, "walk", noted)
    folders.measure()
    assert len(seen) == 2
    assert None not in seen
    assert registry.get_sample_value("flowfleet_state_bytes", {"part": "logs"}) is None
    assert registry.get_sample_value("flowfleet_state_bytes", {"part": "jobs"})


def test_the_metric_counts_each_file_once(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    folder = with_files(tmp_path, "a")
    os.link(folder / "checkpoints/step-00000001/shard.safetensors", folder / "again")
    Folders(tmp_path, registry).measure()
    on_disk = 512 * (folder / "again").stat().st_blocks
    assert registry.get_sample_value("flowfleet_state_bytes", {"part": "jobs"}) == on_disk >= 10_000
    assert registry.get_sample_value("flowfleet_state_bytes", {"part": "trainers"}) > 0  # type: ignore[operator]


async def test_rest_deletes_files_but_not_those_that_an_open_job_names(api: Api, job: Any) -> None:
    first = (await api.submit(job()))["id"]
    await api.store.jobs.set_status(first, JobStatus.SUCCEEDED)
    second = await api.submit(job())
    named = {**second["spec"], "trainer": {**second["spec"]["trainer"], "resume": f"job:{first}"}}

    await api.store.link.redis.hset(keys.job(second["id"]), "spec", json.dumps(named))
    refused = await api.client.delete(f"/v1/jobs/{first}", params={"files": True})
    assert (refused.status_code, "starts from this job's files" in refused.json()["detail"]) == (409, True)
    await api.store.jobs.set_status(second["id"], JobStatus.FAILED)
    assert (await api.client.delete(f"/v1/jobs/{first}", params={"files": True})).status_code == 202
    (found,) = await api.store.removal.ended([first])
    assert (found.wanted_gone, found.with_files) == (True, True)
