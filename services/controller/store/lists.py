"""Jobs as a list shows them, read without their specs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flowfleet.api.answers import read
from flowfleet.api.jobs import JobStatus
from flowfleet.api.overview import Curve, JobRow
from flowfleet.job.spec import JobSpec
from flowfleet.redis import keys
from services.controller.store.link import Linked
from services.controller.store.reading import LISTED, SECONDS, decoded, read_record, row_of
from services.controller.store.records import JobRecord

MAX_POINTS = 64
_ADD = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBYFLOAT', KEYS[1], ARGV[1], ARGV[2]) end"
_ROW = (*LISTED, "brief", "curve")
_SHARED = set(JobRow.model_fields) & set(JobRecord.model_fields)


class Lists(Linked):
    async def page(
        self, cursor: str | None = None, limit: int = 50, status: JobStatus | None = None
    ) -> tuple[list[JobRecord], str | None]:
        """A page, newest first, and the cursor of the next one (None: there is none)."""
        index = keys.jobs() if status is None else keys.jobs_with_status(status)
        start = f"({cursor}" if cursor else "+"
        found = [i.decode() for i in await self._redis.zrevrangebylex(index, start, "-", 0, limit + 1)]
        rows = await self._fields(found[:limit], LISTED)
        records = [read_record(job_id, row, whole=False) for job_id, row in rows.items()]
        return records, found[limit - 1] if len(found) > limit else None

    async def counts(self) -> dict[JobStatus, int]:
        """Jobs by status."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for status in JobStatus:
                pipe.zcard(keys.jobs_with_status(status))
            return dict(zip(JobStatus, await pipe.execute(), strict=True))

    async def rows(self, job_ids: Sequence[str]) -> list[JobRow]:
        """Rows of these jobs without their places, in order; those that are gone are missing."""
        rows = await self._fields(job_ids, _ROW)
        briefs = await self._briefs([job_id for job_id, row in rows.items() if "brief" not in row])
        return [_row(job_id, row, briefs.get(job_id)) for job_id, row in rows.items()]

    async def ids(self, cursor: str | None, limit: int) -> list[str]:
        """Ids of jobs before one (None: from the newest), newest first."""
        found = await self._redis.zrevrangebylex(keys.jobs(), f"({cursor}" if cursor else "+", "-", 0, limit)
        return [job_id.decode() for job_id in found]

    async def add_point(self, job_id: str, step: int, value: float | None) -> None:
        """Adds a step's reward to the job's curve. Added again it changes nothing."""
        row = await self._redis.hget(keys.job(job_id), "curve")
        curve = Curve() if row is None else row_of(Curve, row)
        await self._redis.hset(keys.job(job_id), "curve", with_point(curve, step, value).model_dump_json())

    async def add_seconds(self, job_id: str, seconds: Mapping[str, float]) -> None:
        """Adds to a job's seconds of accelerators, by component. A job that is gone stays gone."""
        for component, number in seconds.items():
            await self._redis.eval(_ADD, 1, keys.job(job_id), SECONDS + component, number)

    async def _fields(self, job_ids: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, str]]:
        """Job → these fields of its record, in order; jobs that were just deleted are missing."""
        found = await self._link.each(job_ids, lambda pipe, job_id: pipe.hmget(keys.job(job_id), names))
        rows = {job_id: decoded(zip(names, row, strict=True)) for job_id, row in zip(job_ids, found, strict=True)}
        return {job_id: row for job_id, row in rows.items() if "status" in row}

    async def _briefs(self, job_ids: Sequence[str]) -> dict[str, dict[str, str]]:
        """Briefs of jobs that an earlier release stored, from their specs."""
        specs = await self._fields(job_ids, ("status", "spec"))
        return {job_id: brief_of(json.loads(row.get("spec", "{}"))) for job_id, row in specs.items()}


def brief_of(spec: Mapping[str, Any] | JobSpec) -> dict[str, str]:
    """Returns what a list shows of a job's spec, also of one that another release stored."""
    settings = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else spec
    rollout, algorithm, model = (dict(settings.get(name, {})) for name in ("rollout", "algorithm", "model"))
    return {
        "pool": str(rollout.get("pool", "default")),
        "algorithm": str(algorithm.get("name", "")),
        "model": str(model.get("path", "")).rstrip("/").rpartition("/")[2],
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


def _row(job_id: str, fields: Mapping[str, str], brief: Mapping[str, str] | None) -> JobRow:
    record = read_record(job_id, fields, whole=False)
    shown = record.model_dump(include=_SHARED)
    try:
        rest = dict(brief or json.loads(fields["brief"])) | {"curve": json.loads(fields.get("curve", "{}"))}
        return read(JobRow, rest | shown)
    except (KeyError, TypeError, ValueError):  # of another release
        return read(JobRow, brief_of({}) | shown)
