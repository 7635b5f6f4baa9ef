"""Ended jobs in a real Redis, and clocks."""

from __future__ import annotations

from typing import Any

import pytest

from flowfleet.api.jobs import JobStatus
from flowfleet.data.blobs import BlobStore, open_blobs
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.redis import keys
from services.controller.store.records import SampleRecord
from services.controller.store.store import Store


class Clock:
    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(redis: Any, clock: Clock) -> Store:
    return Store(redis, clock)


@pytest.fixture
def blobs(redis: Any) -> BlobStore:
    return open_blobs(redis, "redis")


def spec() -> JobSpec:
    return parse_job({"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}})


async def history(store: Store, blobs: BlobStore, rows: int = 3, key: str | None = None) -> str:
    """A job that has begun and left something of each kind."""
    job_id = (await store.jobs.create(spec(), key))[0].id
    await store.jobs.set_status(job_id, JobStatus.RUNNING)
    for step in range(rows):
        await store.events.append(job_id, "phase", {"step": step}, once=f"phase/{step}")
        await store.history.put_metrics(job_id, step, {"actor/loss": 0.5})
        ref = await blobs.put(keys.blob(job_id, "media", step), f"picture {step}".encode(), ttl_s=1000)
        media: dict[str, Any] = {
            "media_uri": ref.uri, "media_size_bytes": ref.size_bytes, "media_sha256": ref.sha256,
        }  # fmt: skip
        await store.samples.put(job_id, SampleRecord(step=step, group=0, index=0, prompt="p", reward=step, **media))
    return job_id
