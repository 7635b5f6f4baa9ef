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


@dataclass
class Returned:
    random: random.Random = field(default_factory=random.Random)
    _tries: dict[str, int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)
    _placed: set[str] = field(default_factory=set)

    def add(self, job_id: str, now: float) -> float:
        """Returns the seconds that the job waits. `now` is of a monotonic clock."""
        self._tries[job_id] = self._tries.get(job_id, 0) + 1
        delay_s = backoff_s(self._tries[job_id], FIRST_S, LONGEST_S) * self.random.uniform(0.5, 1.0)
        self._not_before[job_id] = now + delay_s
        self._placed.discard(job_id)
        return delay_s

    def waits(self, job_id: str, now: float) -> bool:
        return now < self._not_before.get(job_id, now)

    def placed(self, job_id: str) -> None:
        self._tries.pop(job_id, None)
        self._placed.add(job_id)

    def has_place(self, job_id: str) -> bool:
        """True from the trainer's first place on, also while a lost trainer is replaced: rollouts stay meanwhile."""
        return job_id in self._placed

    def end(self, job_id: str) -> None:
        self._tries.pop(job_id, None)
        self._placed.discard(job_id)
        self._not_before.clear()
