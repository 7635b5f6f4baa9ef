"""Notices of what changed. Every event and every change of a record adds one, a job's id, to one stream of the fleet. A
controller reads that stream once for all who watch (api/feed.py)."""

from __future__ import annotations

from flowfleet.redis import keys
from services.controller.store.link import Link, Pipe

MAX_NOTICES = 1000
"""The oldest notices go beyond this: a reader that missed some looks at everything."""


class Notices:
    def __init__(self, link: Link) -> None:
        self._redis = link.redis

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
