"""How full Redis is. Submits are refused above one share of its memory, running jobs pause above a higher one."""

import time
from collections.abc import Callable
from typing import Any

from flowfleet.errors import Full
from services.controller.retention.keep import Keep

LOOK_S = 1.0
"""A look counts for so long: all jobs of a controller share it."""
ADVICE = (
    "delete ended jobs (`flowfleet delete ID`), keep fewer of them (`--keep`), move blobs out of Redis, or give it "
    "more memory"
)


class Memory:
    """Share of one Redis's memory in use. Its limit is `maxmemory`, or the memory of its machine where that is not set.
    A Redis that tells neither is never full."""

    def __init__(self, redis: Any, keep: Keep, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis, self._keep, self._clock = redis, keep, clock
        self._limit, self._share, self._looked = 0, 0.0, float("-inf")

    async def check_room(self) -> None:
        """Raises Full where a submit must be refused."""
        if (share := await self._look()) > self._keep.refuse_above:
            raise Full(
                f"Redis uses {share:.0%} of its memory, and above {self._keep.refuse_above:.0%} no job is accepted: "
                f"{ADVICE}, then submit again"
            )

    async def pause_reason(self) -> str:
        """Why running jobs must pause, and what to do; empty where they may run."""
        share = await self._look()
        if share <= self._keep.pause_above:
            return ""
        return (
            f"Redis uses {share:.0%} of its memory, and above {self._keep.pause_above:.0%} running jobs pause: {ADVICE}"
            f"; the job resumes by itself below {self._resumes_below:.0%}"
        )

    async def has_room(self) -> bool:
        """True if jobs that paused for memory may run again."""
        return await self._look() <= self._resumes_below

    @property
    def _resumes_below(self) -> float:
        return min(self._keep.refuse_above, self._keep.pause_above)

    async def room(self) -> int:
        """Bytes in use above which running jobs pause; 0 where Redis does not tell its limit."""
        return int(await self.limit() * self._keep.pause_above)

    async def limit(self) -> int:
        """Bytes that Redis may use; 0 where it does not tell."""
        await self._look()
        return self._limit

    async def _look(self) -> float:
        if self._clock() - self._looked >= LOOK_S:
            info = await self._redis.info("memory")
            self._limit = info.get("maxmemory") or info.get("total_system_memory") or 0  # some services tell neither
            self._share = info["used_memory"] / self._limit if self._limit else 0.0
            self._looked = self._clock()
        return self._share
