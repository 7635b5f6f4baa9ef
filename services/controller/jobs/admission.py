"""Which jobs get places for their trainers: in the order of the queue, as long as there are places.

A small job goes ahead of a large one that waits for more places than are free, but not for ever: once the large one has
stood there for `BACKFILL_S`, places that become free are kept for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from flowfleet.errors import Full
from services.controller.jobs.queue import score
from services.controller.jobs.sweeps import held_back
from services.controller.limits import Limits
from services.controller.platforms.launcher import FencedLauncher, Launcher
from services.controller.store.records import JobRecord

BACKFILL_S = 1800.0


class Admission:
    def __init__(
        self, launcher: Launcher | FencedLauncher, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._launcher, self._limits, self._clock = launcher, limits, clock
        self._refused: dict[str, float] = {}
        """Job that waits → since when there was no room for it."""

    async def admit(self, waiting: Iterable[JobRecord], active: Iterable[JobRecord], epoch: float) -> dict[str, str]:
        """Gives places to jobs, as there are. Returns why each of the others waits. `active`: all jobs that have not
        ended; `epoch`: now, in Unix seconds."""

        def order(record: JobRecord) -> tuple[float, str]:
            return score(record, epoch)

        now, why, first = self._clock(), dict[str, str](), ""
        known = sorted(active, key=order)
        held = held_back(known)
        for record in sorted(waiting, key=order):
            if record.id in held:
                why[record.id] = "others of its sweep"
            elif first:
                why[record.id] = f"job {first}, which needs more places and comes before it"
            elif reason := self._full(record, known) or await self._launcher.admit(record.id, record.job_spec()):
                why[record.id] = reason
                if now - self._refused.setdefault(record.id, now) > BACKFILL_S:
                    first = record.id
        self._refused = {job_id: since for job_id, since in self._refused.items() if job_id in why}
        return why

    def _full(self, record: JobRecord, active: Iterable[JobRecord]) -> str:
        """Why the job does not fit with those that have places into the operator's limits; "" where it does."""
        others = [other for other in active if other.id in self._launcher.admitted and other.id != record.id]
        try:
            self._limits.check_room(record.job_spec(), others, record.data_bytes, side_by_side=True)
        except Full as error:
            return f"running jobs: {error}" if others else ""
        return ""
