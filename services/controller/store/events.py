"""A job's events, as people see them. A change and its event are one transaction (`add_event`)."""

import json
from collections.abc import Mapping
from typing import Any

from flowfleet.api.jobs import JobEvent
from flowfleet.redis import keys
from services.controller.store.link import Linked, Pipe
from services.controller.store.records import from_epoch

MAX_EVENTS = 100_000
"""The oldest events of a job go beyond this (Redis may keep up to a block more)."""


class Events(Linked):
    async def append(self, job_id: str, type: str, data: Mapping[str, Any], *, once: str | None = None) -> str | None:
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

    async def read(self, job_id: str, after: str | None = None, limit: int = 100) -> list[JobEvent]:
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

    async def last_id(self, job_id: str) -> str:
        """Id of the newest event."""
        found = await self._redis.xrevrange(keys.events(job_id), count=1)
        return str(found[0][0].decode()) if found else "0-0"


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


MAX_NOTICES = 1000
"""The oldest notices go beyond this: a reader that missed some looks at everything."""


class Notices(Linked):
    async def last(self) -> str:
        """Id of the newest notice."""
        found = await self._redis.xrevrange(keys.notices(), count=1)
        return str(found[0][0].decode()) if found else "0-0"

    async def after(self, notice_id: str, wait_s: float) -> list[tuple[str, str]]:
        """Id and job of each notice after one; waits for the first."""
        block_ms = max(1, int(1000 * wait_s))
        found = await self._redis.xread({keys.notices(): notice_id}, count=MAX_NOTICES, block=block_ms)
        return [(name.decode(), fields[b"job"].decode()) for _, entries in found for name, fields in entries]


def notice(pipe: Pipe, job_id: str) -> None:
    """Adds to a transaction that all who watch learn of the job's change."""
    pipe.xadd(keys.notices(), {"job": job_id}, maxlen=MAX_NOTICES, approximate=True)
