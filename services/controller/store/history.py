"""What a job leaves behind for people as it runs: events, metrics by step, checkpoints. A part of JobStore."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from flowfleet.client.types import Checkpoint, JobEvent, MetricsRow
from flowfleet.redis import keys
from services.controller.store.records import Validation, from_epoch
from services.controller.store.rows import notice

Pipe = Any
"""A redis.asyncio Pipeline. redis-py's hints do not know that replies are bytes here, so they are not used."""

MAX_EVENTS = 100_000
"""The oldest events of a job go beyond this (Redis may keep up to a block more)."""


MAX_VALIDATIONS = 10_000
"""Maximum number of a job's validations; beyond it the oldest are deleted, except the first."""


class History:
    _redis: Any

    async def append_event(
        self, job_id: str, type: str, data: Mapping[str, Any], *, once: str | None = None
    ) -> str | None:
        """Appends an event, JSON data, and gives its id.

        `once` names what happened: a second event of that name is not appended (None), so that a step replayed after a
        fault tells its story once.
        """
        if once is None:
            async with self._redis.pipeline(transaction=True) as pipe:
                add_event(pipe, job_id, type, data)
                return str((await pipe.execute())[0].decode())

        async def attempt(pipe: Pipe) -> None:
            if await pipe.sismember(keys.events_once(job_id), once):
                return
            pipe.multi()
            add_event(pipe, job_id, type, data)
            pipe.sadd(keys.events_once(job_id), once)

        replies = await self._redis.transaction(attempt, keys.events_once(job_id))
        return str(replies[0].decode()) if replies else None

    async def events(self, job_id: str, after: str | None = None, limit: int = 100) -> list[JobEvent]:
        """The next events after an id (None: from the oldest kept), in order.

        Where events after that id are no longer kept, an event of type "gap" stands for them.
        """
        name = keys.events(job_id)
        if after is None:
            return [_event(*entry) for entry in await self._redis.xrange(name, "-", "+", limit)]
        async with self._redis.pipeline(transaction=True) as pipe:
            oldest, following = await pipe.xrange(name, "-", "+", 1).xrange(name, f"({after}", "+", limit).execute()
        found = [_event(*entry) for entry in following]
        gap = _gap(after, _event(*oldest[0])) if oldest else None
        return found if gap is None else [gap, *found][:limit]

    async def last_event(self, job_id: str) -> str:
        """Id of the newest event."""
        found = await self._redis.xrevrange(keys.events(job_id), count=1)
        return str(found[0][0].decode()) if found else "0-0"

    async def metrics_put(self, job_id: str, step: int, values: Mapping[str, float]) -> None:
        """Adds to the row of a step, last writer wins: doing it again changes nothing."""
        async with self._redis.pipeline(transaction=True) as pipe:
            if values:
                pipe.hset(keys.metrics(job_id, step), mapping={name: repr(float(v)) for name, v in values.items()})
            pipe.zadd(keys.metrics_steps(job_id), {str(step): step})
            await pipe.execute()

    async def metrics(self, job_id: str, after_step: int | None = None, limit: int = 1000) -> list[MetricsRow]:
        """Rows of the next steps after one (None: from the first), ascending."""
        low = "-inf" if after_step is None else f"({after_step}"
        steps = [int(s) for s in await self._redis.zrangebyscore(keys.metrics_steps(job_id), low, "+inf", 0, limit)]
        async with self._redis.pipeline(transaction=False) as pipe:
            for step in steps:
                pipe.hgetall(keys.metrics(job_id, step))
            rows = await pipe.execute()
        return [
            MetricsRow(step=step, values={name.decode(): float(value) for name, value in row.items()})
            for step, row in zip(steps, rows, strict=True)
        ]

    async def add_checkpoint(
        self, job_id: str, checkpoint: Checkpoint, *, keep_last: int | None = None, keep: Collection[int] = ()
    ) -> None:
        """One a step: adding it again replaces it. Only the `keep_last` newest (None: all) and those of the steps
        `keep` stay."""
        await self._redis.hset(keys.checkpoints(job_id), str(checkpoint.step), checkpoint.model_dump_json())
        steps = sorted(int(name) for name in await self._redis.hkeys(keys.checkpoints(job_id)))
        gone = [step for step in steps[:-keep_last] if step not in keep] if keep_last is not None else []
        if gone:
            await self._redis.hdel(keys.checkpoints(job_id), *(str(step) for step in gone))

    async def forget_checkpoints(self, job_id: str, *, above: int) -> None:
        """Forgets lost checkpoints of later steps."""
        steps = [name for name in await self._redis.hkeys(keys.checkpoints(job_id)) if int(name) > above]
        if steps:
            await self._redis.hdel(keys.checkpoints(job_id), *steps)

    async def checkpoints(self, job_id: str) -> list[Checkpoint]:
        """Checkpoints by step, ascending."""
        rows = await self._redis.hvals(keys.checkpoints(job_id))
        return sorted((Checkpoint.model_validate_json(row) for row in rows), key=lambda checkpoint: checkpoint.step)

    async def add_validation(self, job_id: str, validation: Validation) -> None:
        """One a version: adding it again replaces it."""
        name = keys.validations(job_id)
        await self._redis.hset(name, str(validation.version), validation.model_dump_json())
        versions = sorted(int(field) for field in await self._redis.hkeys(name))
        if gone := versions[1 : max(1, 1 + len(versions) - MAX_VALIDATIONS)]:
            await self._redis.hdel(name, *map(str, gone))

    async def validations(self, job_id: str) -> list[Validation]:
        """Validations by version, ascending."""
        rows = await self._redis.hvals(keys.validations(job_id))
        return sorted((Validation.model_validate_json(row) for row in rows), key=lambda one: one.version)


def add_event(pipe: Pipe, job_id: str, type: str, data: Mapping[str, Any]) -> None:
    """Makes the event a part of a transaction."""
    pipe.xadd(keys.events(job_id), {"type": type, "data": encode(data)}, maxlen=MAX_EVENTS, approximate=True)
    notice(pipe, job_id)


def encode(value: Any) -> str:
    """JSON. Raises ValueError for NaN and infinity, which JSON has not."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _gap(after: str, oldest: JobEvent) -> JobEvent | None:
    """The event that stands for those after `after` that are gone. A job's stream begins with its first status."""
    is_first = oldest.type == "status" and oldest.data["previous"] == ""
    before = _before(oldest.id)
    if is_first or _order(after) >= before:
        return None
    reason = f"events after {after} and before {oldest.id} are no longer kept"
    data = {"after": after, "before": oldest.id, "reason": reason}
    return JobEvent(id="{}-{}".format(*before), type="gap", time=oldest.time, data=data)


def _order(event_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = event_id.partition("-")
    return int(milliseconds), int(sequence or 0)


def _before(event_id: str) -> tuple[int, int]:
    """Greatest id below: where a reader resumes after the gap was reported."""
    milliseconds, sequence = _order(event_id)
    return (milliseconds, sequence - 1) if sequence else (milliseconds - 1, (1 << 64) - 1)


def _event(entry_id: bytes, fields: dict[bytes, bytes]) -> JobEvent:
    milliseconds = int(entry_id.split(b"-")[0])
    return JobEvent(
        id=entry_id.decode(),
        type=fields[b"type"].decode(),
        time=from_epoch(milliseconds / 1000),
        data=json.loads(fields[b"data"]),
    )
