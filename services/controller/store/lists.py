"""Jobs as a list shows them, read without their specs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flowfleet.client.overview import Curve, JobRow
from flowfleet.client.types import JobStatus, Progress
from flowfleet.job.spec import JobSpec
from flowfleet.redis import keys
from services.controller.store.link import Link
from services.controller.store.reading import SECONDS, hours_of, read_record
from services.controller.store.records import JobRecord, from_epoch

MAX_POINTS = 64
_ADD = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBYFLOAT', KEYS[1], ARGV[1], ARGV[2]) end"
_TIMES = ("created_at", "started_at", "ended_at")
_FIELDS = ("name", "owner", "status", "desired", "reason", *_TIMES, "brief", "curve")
_PROGRESS = tuple(Progress.model_fields)
_HOURS = tuple(SECONDS + component for component in ("rollout", "trainer"))
_NAMES = (*_FIELDS, *(f"progress.{name}" for name in _PROGRESS), *_HOURS)


class Lists:
    def __init__(self, link: Link) -> None:
        self._redis = link.redis

    async def page(
        self, cursor: str | None = None, limit: int = 50, status: JobStatus | None = None
    ) -> tuple[list[JobRecord], str | None]:
        """A page, newest first, and the cursor of the next one (None: there is none)."""
        index = keys.jobs() if status is None else keys.jobs_with_status(status)
        start = f"({cursor}" if cursor else "+"
        found = [i.decode() for i in await self._redis.zrevrangebylex(index, start, "-", 0, limit + 1)]
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id in found[:limit]:
                pipe.hgetall(keys.job(job_id))
            rows = await pipe.execute()
        known = zip(found, rows, strict=False)
        records = [read_record(job_id, row) for job_id, row in known if row]  # else just deleted
        return records, found[limit - 1] if len(found) > limit else None

    async def counts(self) -> dict[JobStatus, int]:
        """Jobs by status."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for status in JobStatus:
                pipe.zcard(keys.jobs_with_status(status))
            return dict(zip(JobStatus, await pipe.execute(), strict=True))

    async def rows(self, job_ids: Sequence[str]) -> list[JobRow]:
        """Rows of these jobs without their places, in order; those that are gone are missing."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hmget(keys.job(job_id), _NAMES)
            found = await pipe.execute() if job_ids else []
        known = [(job_id, dict(zip(_NAMES, row, strict=True))) for job_id, row in zip(job_ids, found, strict=True)]
        old = [job_id for job_id, row in known if row["status"] is not None and row["brief"] is None]
        briefs = await self._briefs(old) if old else {}
        return [_row(job_id, row, briefs.get(job_id)) for job_id, row in known if row["status"] is not None]

    async def ids(self, cursor: str | None, limit: int) -> list[str]:
        """Ids of jobs before one (None: from the newest), newest first."""
        found = await self._redis.zrevrangebylex(keys.jobs(), f"({cursor}" if cursor else "+", "-", 0, limit)
        return [job_id.decode() for job_id in found]

    async def add_point(self, job_id: str, step: int, value: float | None) -> None:
        """Adds a step's reward to the job's curve. Added again it changes nothing."""
        row = await self._redis.hget(keys.job(job_id), "curve")
        curve = Curve() if row is None else Curve.model_validate_json(row)
        await self._redis.hset(keys.job(job_id), "curve", with_point(curve, step, value).model_dump_json())

    async def add_seconds(self, job_id: str, seconds: Mapping[str, float]) -> None:
        """Adds to a job's seconds of accelerators, by component. A job that is gone stays gone."""
        for component, number in seconds.items():
            await self._redis.eval(_ADD, 1, keys.job(job_id), SECONDS + component, number)

    async def _briefs(self, job_ids: Sequence[str]) -> dict[str, dict[str, str]]:
        """Briefs of jobs that an earlier release stored, from their specs."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hget(keys.job(job_id), "spec")
            specs = await pipe.execute()
        return {job_id: brief_of(json.loads(spec)) for job_id, spec in zip(job_ids, specs, strict=True) if spec}


def brief_of(spec: Mapping[str, Any] | JobSpec) -> dict[str, str]:
    """What a list shows of a job's spec."""
    settings = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else spec
    return {
        "pool": str(settings["rollout"].get("pool", "default")),
        "algorithm": str(settings["algorithm"].get("name", "")),
        "model": str(settings["model"]["path"]).rstrip("/").rpartition("/")[2],
    }


def with_point(curve: Curve, step: int, value: float | None) -> Curve:
    """The curve with a step's value, in at most MAX_POINTS points: of a longer job every second one goes."""
    stride, values = curve.stride, list(curve.values)
    while step // stride >= MAX_POINTS:
        stride, values = 2 * stride, values[::2]
    if step % stride == 0:
        values += [None] * (step // stride + 1 - len(values))
        values[step // stride] = value
    return Curve(stride=stride, values=tuple(values))


def _row(job_id: str, row: Mapping[str, bytes | None], brief: Mapping[str, str] | None) -> JobRow:
    text = {name: value.decode() for name, value in row.items() if value is not None}
    progress = {name: json.loads(text[f"progress.{name}"]) for name in _PROGRESS if f"progress.{name}" in text}
    return JobRow.model_validate(
        {
            "id": job_id,
            **{name: text[name] for name in ("name", "owner", "status", "desired", "reason") if name in text},
            **{name: from_epoch(float(text[name])) for name in _TIMES if name in text},
            **(brief or json.loads(text["brief"])),
            "progress": progress,
            "curve": json.loads(text.get("curve", "{}")),
            "accelerator_hours": hours_of(text),
        }
    )
