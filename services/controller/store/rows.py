"""Jobs as a list shows them, read without their specs, and the notices of what changed. A part of JobStore.

Every event and every change of a record adds a notice, a job's id, to one stream of the fleet. A controller reads that
stream once for all who watch (api/feed.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flowfleet.client.overview import Curve, JobRow
from flowfleet.client.types import JobStatus, Progress, RewardLoad
from flowfleet.job.spec import JobSpec
from flowfleet.redis import keys
from services.controller.store.records import from_epoch

MAX_NOTICES = 1000
"""The oldest notices go beyond this: a reader that missed some looks at everything."""
MAX_POINTS = 64
LOAD_TTL_S = 30
_SECONDS = "accelerator_s."
_ADD = "if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBYFLOAT', KEYS[1], ARGV[1], ARGV[2]) end"
_TIMES = ("created_at", "started_at", "ended_at")
_FIELDS = ("name", "owner", "status", "desired", "reason", *_TIMES, "brief", "curve")
_PROGRESS = tuple(Progress.model_fields)
_HOURS = tuple(_SECONDS + component for component in ("rollout", "trainer"))
_NAMES = (*_FIELDS, *(f"progress.{name}" for name in _PROGRESS), *_HOURS)


class JobRows:
    _redis: Any

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

    async def unended_ids(self) -> list[str]:
        """Ids of the jobs that have not ended, oldest first; a full Redis gives them too."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for status in JobStatus:
                if not status.terminal:
                    pipe.zrange(keys.jobs_with_status(status), 0, -1)
            return sorted({job_id.decode() for found in await pipe.execute() for job_id in found})

    async def add_point(self, job_id: str, step: int, value: float | None) -> None:
        """Adds a step's reward to the job's curve. Added again it changes nothing."""
        row = await self._redis.hget(keys.job(job_id), "curve")
        curve = Curve() if row is None else Curve.model_validate_json(row)
        await self._redis.hset(keys.job(job_id), "curve", with_point(curve, step, value).model_dump_json())

    async def add_seconds(self, job_id: str, seconds: Mapping[str, float]) -> None:
        """Adds to a job's seconds of accelerators, by component. A job that is gone stays gone."""
        for component, number in seconds.items():
            await self._redis.eval(_ADD, 1, keys.job(job_id), _SECONDS + component, number)

    async def put_reward_load(self, load: Mapping[str, RewardLoad]) -> None:
        """Keeps the load of the rewards for a while, as the controller that runs jobs sees it."""
        rows = {name: one.model_dump(mode="json") for name, one in load.items()}
        await self._redis.set(keys.reward_load(), json.dumps(rows), ex=LOAD_TTL_S)

    async def reward_load(self) -> dict[str, RewardLoad]:
        rows = json.loads(await self._redis.get(keys.reward_load()) or b"{}")
        return {name: RewardLoad.model_validate(row) for name, row in rows.items()}

    async def last_notice(self) -> str:
        found = await self._redis.xrevrange(keys.notices(), count=1)
        return str(found[0][0].decode()) if found else "0-0"

    async def notices(self, after: str, wait_s: float) -> list[tuple[str, str]]:
        """Id and job of each notice after one; waits for the first."""
        found = await self._redis.xread({keys.notices(): after}, count=MAX_NOTICES, block=max(1, int(1000 * wait_s)))
        return [(name.decode(), fields[b"job"].decode()) for _, entries in found for name, fields in entries]

    async def _briefs(self, job_ids: Sequence[str]) -> dict[str, dict[str, str]]:
        """Briefs of jobs that an earlier release stored, from their specs."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hget(keys.job(job_id), "spec")
            specs = await pipe.execute()
        return {job_id: brief_of(json.loads(spec)) for job_id, spec in zip(job_ids, specs, strict=True) if spec}


def notice(pipe: Any, job_id: str) -> None:
    """Adds to a transaction that all who watch learn of the job's change."""
    pipe.xadd(keys.notices(), {"job": job_id}, maxlen=MAX_NOTICES, approximate=True)


def brief_of(spec: Mapping[str, Any] | JobSpec) -> dict[str, str]:
    """What a list shows of a job's spec."""
    settings = spec.model_dump(mode="json") if isinstance(spec, JobSpec) else spec
    return {
        "pool": str(settings["rollout"].get("pool", "default")),
        "algorithm": str(settings["algorithm"].get("name", "")),
        "model": str(settings["model"]["path"]).rstrip("/").rpartition("/")[2],
    }


def hours_of(fields: Mapping[str, str]) -> dict[str, float]:
    """Component → hours of accelerators, from a job's record."""
    found = {name.removeprefix(_SECONDS): float(value) for name, value in fields.items() if name.startswith(_SECONDS)}
    return {component: seconds / 3600 for component, seconds in sorted(found.items())}


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
