"""Turns of jobs at the replicas of a rollout pool, which serve one job at a time. Pure.

A job takes the turn when it needs replicas, and leaves it when it needs none or when others wait and a step of its own
is sampled (job/turn.py). Those who wait get it in order of asking.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable


class Turns:
    def __init__(self) -> None:
        self._queues: defaultdict[str, list[str]] = defaultdict(list)
        """Jobs by pool: the first has the turn, the others wait."""
        self._tell: dict[str, Callable[[], None]] = {}

    def take(self, pool: str, job_id: str, tell: Callable[[], None]) -> bool:
        """True if the job has the turn; else it waits from now on, and `tell` is called when it has it."""
        if job_id not in self._queues[pool]:
            self._queues[pool].append(job_id)
        self._tell[job_id] = tell
        return self.has(pool, job_id)

    def leave(self, pool: str, job_id: str) -> None:
        """Gives the turn, or the place among those who wait, to the next."""
        queue, had = self._queues[pool], self.has(pool, job_id)
        if self._tell.pop(job_id, None) is not None:
            queue.remove(job_id)
        if had and queue:
            self._tell[queue[0]]()

    def has(self, pool: str, job_id: str) -> bool:
        return self._queues[pool][:1] == [job_id]

    def is_taken(self, pool: str) -> bool:
        return bool(self._queues[pool])

    def is_wanted(self, pool: str) -> bool:
        """True if others wait for the turn."""
        return len(self._queues[pool]) > 1
