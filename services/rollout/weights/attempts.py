"""Refuses weights of a trainer that was replaced: it may wake when the next one has published. Pure."""

from __future__ import annotations

from flowfleet.errors import Conflict
from flowfleet.lru import LruCache

MAX_JOBS = 64
"""Jobs remembered: a replica serves one after the other."""


class Attempts:
    """The newest trainer of each job that this replica has heard of."""

    def __init__(self) -> None:
        self._newest: LruCache[str, int] = LruCache(MAX_JOBS)

    def admit(self, job_id: str, attempt: int) -> None:
        """Raises Conflict for one that is not the newest. 0 means an unknown number and is admitted."""
        newest = self._newest.get(job_id) or 0
        if 0 < attempt < newest:
            raise Conflict(f"trainer {attempt} of job {job_id} was replaced by trainer {newest}: it must end")
        if attempt > 0:
            self._newest.put(job_id, attempt)
