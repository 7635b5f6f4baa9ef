"""The job store against a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowfleet.api.jobs import Checkpoint, Desired, JobStatus
from flowfleet.errors import Conflict, NotFound
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.redis.client import connect
from services.controller.store.records import Action, from_epoch, new_job_id
from services.controller.store.store import Store


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    client = connect(redis_url)
    yield Store(client, Clock())
    await client.aclose()


def spec(**changes: Any) -> JobSpec:
    base = {"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}, "schedule": {"steps": 7}}
    return parse_job({**base, **changes})


def test_ids_sort_by_time_and_are_uuid7() -> None:
    ids = [new_job_id(time_ns) for time_ns in range(10**18, 10**18 + 10_000_000, 1_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)
    assert {(name[14], name[19] in "89ab") for name in ids} == {("7", True)}
    assert int(ids[0].replace("-", "")[:12], 16) == 10**12


async def test_a_new_job_is_queued_with_its_spec(store: Store) -> None:
    record, created = await store.jobs.create(spec(name="signs", seed=5))
    assert created
    assert (record.status, record.desired, record.name) == (JobStatus.QUEUED, Desired.RUNNING, "signs")
    assert record.job_spec() == spec(name="signs", seed=5)
    assert record.progress.steps == 7
    assert record.created_at.timestamp() == 1_700_000_001.0
    assert await store.jobs.get(record.id) == record
    assert await store.jobs.active() == [record.id]


async def test_the_same_key_gives_the_same_job_and_another_body_conflicts(store: Store) -> None:
    first, created = await store.jobs.create(spec(seed=1), "key")
    again, created_again = await store.jobs.create(spec(seed=1), "key")
    assert (created, created_again) == (True, False)
    assert first == again
    assert (await store.jobs.find_submitted(spec(seed=1), "key")) == first
    assert (await store.jobs.find_submitted(spec(seed=1), "other")) is None
    for submit in (store.jobs.create, store.jobs.find_submitted):
        with pytest.raises(Conflict, match=first.id):
            await submit(spec(seed=2), "key")
    assert await store.jobs.active() == [first.id]


async def test_unknown_job(store: Store) -> None:
    unknown = new_job_id()
    with pytest.raises(NotFound):
        await store.jobs.get(unknown)
    with pytest.raises(NotFound):
        await store.jobs.set_status(unknown, JobStatus.RUNNING)
    with pytest.raises(NotFound):
        await store.jobs.request(unknown, "pause")
    assert await store.lists.page() == ([], None)


async def test_pages_are_newest_first_and_filtered_by_status(store: Store) -> None:
    ids = [(await store.jobs.create(spec()))[0].id for _ in range(5)]
    await store.jobs.set_status(ids[1], JobStatus.FAILED, "no disk")
    seen, cursor = [], None
    for _ in range(3):
        page, cursor = await store.lists.page(cursor, 2)
        seen += [record.id for record in page]
    assert cursor is None
    assert seen == ids[::-1]
    assert [record.id for record in (await store.lists.page(status=JobStatus.FAILED))[0]] == [ids[1]]
    assert [record.id for record in (await store.lists.page(status=JobStatus.QUEUED))[0]] == [
        ids[4],
        ids[3],
        ids[2],
        ids[0],
    ]
    assert await store.jobs.active() == [ids[0], *ids[2:]]
    assert {status: n for status, n in (await store.lists.counts()).items() if n} == {
        JobStatus.QUEUED: 4,
        JobStatus.FAILED: 1,
    }


async def test_status_keeps_times_and_tells_each_change_once(store: Store) -> None:
    job = (await store.jobs.create(spec()))[0].id
    assert await store.jobs.set_status(job, "starting")
    assert await store.jobs.set_status(job, "running")
    assert not await store.jobs.set_status(job, "running")
    started = (await store.jobs.get(job)).started_at
    await store.jobs.set_status(job, "starting", "trainer restarts")
    await store.jobs.set_status(job, "running")
    await store.jobs.set_status(job, "succeeded")
    record = await store.jobs.get(job)
    assert started is not None
    assert record.started_at == started
    assert record.ended_at is not None
    assert record.ended_at > started
    statuses = [event.data["status"] for event in await store.events.read(job)]
    assert statuses == ["queued", "starting", "running", "starting", "running", "succeeded"]
    assert [event.final for event in await store.events.read(job)] == [False] * 5 + [True]
    with pytest.raises(Conflict, match="ended as succeeded"):
        await store.jobs.set_status(job, "running")
    assert await store.jobs.active() == []


async def test_requests_set_what_is_desired_and_are_idempotent(store: Store) -> None:
    job = (await store.jobs.create(spec()))[0].id
    wishes: list[tuple[Action, str]] = [("pause", "paused"), ("pause", "paused"), ("resume", "running")]
    wishes.append(("cancel", "cancelled"))
    for action, desired in wishes:
        assert (await store.jobs.request(job, action)).desired == desired
    assert [e.data["action"] for e in await store.events.read(job) if e.type == "request"] == [
        "pause",
        "resume",
        "cancel",
    ]
    refused: list[Action] = ["pause", "resume"]
    for action in refused:
        with pytest.raises(Conflict, match="being cancelled"):
            await store.jobs.request(job, action)
    await store.jobs.set_status(job, JobStatus.CANCELLED)
    assert (await store.jobs.request(job, "cancel")).status == JobStatus.CANCELLED
    with pytest.raises(Conflict, match="ended as cancelled"):
        await store.jobs.request(job, "resume")


async def test_events_are_paged_and_once_means_once(store: Store) -> None:
    job = (await store.jobs.create(spec()))[0].id
    ids = [await store.events.append(job, "phase", {"step": step}) for step in range(4)]
    assert await store.events.append(job, "saved", {"step": 1}, once="saved/1") is not None
    assert await store.events.append(job, "saved", {"step": 1}, once="saved/1") is None
    assert [event.data["step"] for event in await store.events.read(job, after=ids[1])] == [2, 3, 1]
    assert [event.id for event in await store.events.read(job, after=ids[0], limit=2)] == ids[1:3]


async def test_progress_changes_only_the_fields_given(store: Store) -> None:
    job = (await store.jobs.create(spec()))[0].id
    await store.jobs.update_progress(job, step=2, phase="train", samples_dropped={"unscored": 3})
    await store.jobs.update_progress(job, reward=float("nan"), images_per_second=4.5, announce=False)
    progress = (await store.jobs.get(job)).progress
    assert (progress.step, progress.steps, progress.phase, progress.reward) == (2, 7, "train", None)
    assert (progress.images_per_second, progress.samples_dropped) == (4.5, {"unscored": 3})
    events = [event.data for event in await store.events.read(job) if event.type == "progress"]
    assert events == [{"step": 2, "phase": "train", "samples_dropped": {"unscored": 3}}]
    with pytest.raises(ValueError, match="speed"):
        await store.jobs.update_progress(job, speed=1)


async def test_metrics_are_idempotent_by_step(store: Store) -> None:
    job = (await store.jobs.create(spec()))[0].id
    for step in (10, 2, 2, 0):
        await store.history.put_metrics(job, step, {"actor/loss": step / 3, "actor/ratio": float("inf")})
    await store.history.put_metrics(job, 2, {"val/reward": 0.5})
    rows = await store.history.metrics(job)
    assert [row.step for row in rows] == [0, 2, 10]
    assert rows[1].values == {"actor/loss": 2 / 3, "actor/ratio": None, "val/reward": 0.5}
    assert [row.step for row in await store.history.metrics(job, after_step=0, limit=1)] == [2]


async def test_checkpoints_and_results(store: Store) -> None:
    job = (await store.jobs.create(spec()))[0].id
    for step in (20, 10, 10, 30):
        record = Checkpoint(step=step, path=f"checkpoints/{step}", created_at=from_epoch(step))
        await store.history.add_checkpoint(job, record, keep_last=2)
    assert [(c.step, c.path) for c in await store.history.checkpoints(job)] == [
        (20, "checkpoints/20"),
        (30, "checkpoints/30"),
    ]
    await store.jobs.set_results(job, {"model": "out/model"})
    assert (await store.jobs.get(job)).results == {"model": "out/model"}
