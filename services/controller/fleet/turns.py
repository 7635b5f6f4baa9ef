"""Turns of jobs at the replicas of a rollout pool. Pure.

Replicas serve one job at a time, or jobs on one base whose adapters they can have ready together: these share a turn. A
job takes the turn when it needs replicas, and leaves it when it needs none or when others wait and a step of its own is
sampled (job/turn.py). Those who wait get it in order of asking.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

_NONE: tuple[str, Callable[[], bool]] = ("", bool)


@dataclass
class _Turn:
    base: str
    jobs: list[str]


class Turns:
    def __init__(self) -> None:
        self._queues: defaultdict[str, list[_Turn]] = defaultdict(list)
        """Turns by pool: the first runs, the others wait."""
        self._tell: dict[str, Callable[[], None]] = {}
        self.stored: set[str] = set()
        """Jobs whose newest adapter replicas can fetch, with or without their trainer."""
        self._bases: dict[str, tuple[str, Callable[[], bool]]] = {}

    def share(self, job_id: str, base: str, may_share: Callable[[], bool]) -> None:
        """From now on the job shares turns with those that have the same base, as long as it may; "" is none."""
        self._bases[job_id] = base, may_share

    def forget(self, job_id: str) -> None:
        self._bases.pop(job_id, None)
        self.stored.discard(job_id)

    def take(self, pool: str, job_id: str, tell: Callable[[], None]) -> bool:
        """True if the job has the turn; else it waits from now on, and `tell` is called when it has it. While jobs of
        another base wait, the turn that runs takes in no more."""
        queue = self._queues[pool]
        if not any(job_id in turn.jobs for turn in queue):
            base = self._base(job_id)
            open_to_all = queue if len(queue) == 1 else queue[1:]
            turn = next((turn for turn in open_to_all if turn.base == base), None) if base else None
            if turn is None:
                queue.append(turn := _Turn(base, []))
            turn.jobs.append(job_id)
        self._tell[job_id] = tell
        return self.has(pool, job_id)

    def leave(self, pool: str, job_id: str) -> None:
        """Gives the turn, or the place among those who wait, to the next."""
        queue = self._queues[pool]
        self._tell.pop(job_id, None)
        turn = next((turn for turn in queue if job_id in turn.jobs), None)
        if turn is None:
            return
        turn.jobs.remove(job_id)
        if turn.jobs:
            return
        had = queue[0] is turn
        queue.remove(turn)
        for other in queue[0].jobs if had and queue else ():
            self._tell[other]()

    def has(self, pool: str, job_id: str) -> bool:
        queue = self._queues[pool]
        return bool(queue) and job_id in queue[0].jobs

    def is_taken(self, pool: str, job_id: str) -> bool:
        """True if jobs have the turn with which this one cannot share it."""
        queue, base = self._queues[pool], self._base(job_id)
        return bool(queue) and not (base and len(queue) == 1 and queue[0].base == base)

    def is_wanted(self, pool: str) -> bool:
        """True if others wait for the turn."""
        return len(self._queues[pool]) > 1

    def is_shared(self, job_id: str) -> bool:
        """True if other jobs that run have the same base."""
        base, _ = self._bases.get(job_id, _NONE)
        return bool(base) and sum(other == base for other, _ in self._bases.values()) > 1

    def _base(self, job_id: str) -> str:
        base, may_share = self._bases.get(job_id, _NONE)
        return base if may_share() else ""
