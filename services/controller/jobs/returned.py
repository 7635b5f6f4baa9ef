"""Jobs that returned to the queue because their trainers found no place: when each may be taken up again. Pure.

    add      a trainer found no place    the job waits, twice as long as the time before, by a random factor
    end      a job ended                 the waiting jobs may try at once, for its place may be free
    placed   the trainer has a place     the next time counts as the first, and rollouts may come

The random factor keeps jobs apart that gave up together: whoever is first then finds the place of all.
A controller that takes over knows of no waits, so it tries all jobs at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from flowfleet.backoff import backoff_s

FIRST_S = 60.0
LONGEST_S = 1800.0
KEPT_S = 300.0
"""Rollouts stay for so long while a lost trainer is replaced."""


@dataclass
class Returned:
    random: random.Random = field(default_factory=random.Random)
    _tries: dict[str, int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)
    _placed: dict[str, float] = field(default_factory=dict)
    """Job → when its trainer was last seen in its place."""

    def add(self, job_id: str, now: float) -> float:
        """Returns the seconds that the job waits. `now` is of a monotonic clock."""
        self._tries[job_id] = self._tries.get(job_id, 0) + 1
        delay_s = backoff_s(self._tries[job_id], FIRST_S, LONGEST_S) * self.random.uniform(0.5, 1.0)
        self._not_before[job_id] = now + delay_s
        self._placed.pop(job_id, None)
        return delay_s

    def waits(self, job_id: str, now: float) -> bool:
        return now < self._not_before.get(job_id, now)

    def placed(self, job_id: str, now: float) -> None:
        self._tries.pop(job_id, None)
        self._placed[job_id] = now

    def has_place(self, job_id: str, now: float) -> bool:
        """True if the job may have rollouts."""
        return now - self._placed.get(job_id, -KEPT_S) < KEPT_S

    def end(self, job_id: str) -> None:
        self._tries.pop(job_id, None)
        self._placed.pop(job_id, None)
        self._not_before.clear()
