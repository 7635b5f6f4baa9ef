"""Turns of batches at an engine that samples for several jobs. Pure.

Owners get equal shares of the engine's time, and the jobs of an owner share that by their weights: next comes the batch
of the owner, then of the job, that had the least. A batch counts by its prediction until it is measured. Whoever comes
back starts at what those who wait have had, so that time without work is not saved up.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Share:
    """Whose batch it is. `key`: batches of equal keys may go together; None: with no other."""

    job_id: str
    owner: str = ""
    weight: float = 1.0
    key: Hashable | None = None
    rows: int = 0
    """Most rows of a forward that this job's rows share."""


MAX_JOBS = 1024
"""Jobs and owners remembered."""

Work = TypeVar("Work")


@dataclass(eq=False, slots=True)
class Waiting(Generic[Work]):
    share: Share
    work: Work
    rows: int
    cost: float
    """Predicted, in any unit that all batches have in common."""


@dataclass(slots=True)
class _Had:
    """Time that an owner or a job has had, divided by its weight."""

    time: float = 0.0
    waiting: int = 0


@dataclass
class Turns(Generic[Work]):
    _queues: defaultdict[tuple[str, str], deque[Waiting[Work]]] = field(default_factory=lambda: defaultdict(deque))
    _owners: dict[str, _Had] = field(default_factory=dict)
    _jobs: dict[tuple[str, str], _Had] = field(default_factory=dict)
    _rate: float = 1.0
    """Measured seconds for a predicted unit."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, waiting: Waiting[Work]) -> None:
        place = waiting.share.owner, waiting.share.job_id
        for known in (self._owners, self._jobs):
            for gone in [one for one, had in known.items() if not had.waiting][: max(0, len(known) - MAX_JOBS)]:
                del known[gone]  # type: ignore[arg-type]
        siblings = [had for (owner, _), had in self._jobs.items() if owner == place[0]]
        _enter(self._owners.setdefault(place[0], _Had()), self._owners.values())
        _enter(self._jobs.setdefault(place, _Had()), siblings)
        self._queues[place].append(waiting)

    def next(self, most_rows: int) -> list[Waiting[Work]]:
        """The batch whose turn it is, and others that go with it, in their turns, up to so many rows."""
        taken: list[Waiting[Work]] = []
        while (place := self._first(lambda one: _fits(one, taken, most_rows))) is not None:
            taken.append(self._take(place, next(one for one in self._queues[place] if _fits(one, taken, most_rows))))
        return taken

    def ran(self, taken: list[Waiting[Work]], seconds: float) -> None:
        """The batches took so long together: each counts by its share."""
        whole = sum(one.cost for one in taken)
        for one in taken:
            self._charge(one, seconds * one.cost / whole - self._rate * one.cost)
        self._rate += 0.2 * (seconds / whole - self._rate)

    def _first(self, fits: Callable[[Waiting[Work]], bool]) -> tuple[str, str] | None:
        able = [place for place, queue in self._queues.items() if any(map(fits, queue))]
        return min(able, key=lambda place: (self._owners[place[0]].time, self._jobs[place].time), default=None)

    def _take(self, place: tuple[str, str], waiting: Waiting[Work]) -> Waiting[Work]:
        self._queues[place].remove(waiting)
        if not self._queues[place]:
            del self._queues[place]
        self._charge(waiting, self._rate * waiting.cost)
        self._owners[place[0]].waiting -= 1
        self._jobs[place].waiting -= 1
        return waiting

    def _charge(self, one: Waiting[Work], seconds: float) -> None:
        place = one.share.owner, one.share.job_id
        for had, weight in ((self._owners.get(place[0]), 1.0), (self._jobs.get(place), one.share.weight)):
            if had is not None:
                had.time += seconds / weight


def _fits(one: Waiting[Work], taken: list[Waiting[Work]], most_rows: int) -> bool:
    if not taken:
        return True
    is_alike = one.share.key is not None and one.share.key == taken[0].share.key
    together = [*taken, one]
    if one.share.job_id in {other.share.job_id for other in taken}:  # a job alone keeps the forwards that it has
        return False
    most = min(most_rows, max(other.share.rows for other in together))
    return is_alike and sum(other.rows for other in together) <= most


def _enter(had: _Had, others: object) -> None:
    """Counts one more that waits. One that did not wait starts no further back than those who do."""
    if not had.waiting:
        times = [other.time for other in others if other.waiting]  # type: ignore[attr-defined]
        had.time = max([had.time, *([min(times)] if times else [])])
    had.waiting += 1
