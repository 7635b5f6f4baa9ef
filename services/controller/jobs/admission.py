"""Which jobs get places for their trainers: in the order of the queue, as long as there are places.

A small job goes ahead of a large one that waits for more places than are free, but not for ever: once the large one has
stood there for `BACKFILL_S`, places that become free are kept for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from services.controller.jobs.queue import score
from services.controller.jobs.sweeps import held_back
from services.controller.platforms.launcher import FencedLauncher, Launcher
from services.controller.store.records import JobRecord

BACKFILL_S = 1800.0


class Admission:
    def __init__(self, launcher: Launcher | FencedLauncher, clock: Callable[[], float] = time.monotonic) -> None:
        self._launcher, self._clock = launcher, clock
        self._refused: dict[str, float] = {}
        """Job that waits → since when there was no room for it."""

    async def admit(self, waiting: Iterable[JobRecord], active: Iterable[JobRecord], epoch: float) -> dict[str, str]:
        """Gives places to jobs, as there are. Returns why each of the others waits. `active`: all jobs that have not
        ended; `epoch`: now, in Unix seconds."""

        def order(record: JobRecord) -> tuple[float, str]:
            return score(record, epoch)

        now, why, first = self._clock(), dict[str, str](), ""
        held = held_back(sorted(active, key=order))
        for record in sorted(waiting, key=order):
            if record.id in held:
                why[record.id] = "others of its sweep"
            elif first:
                why[record.id] = f"job {first}, which needs more places and comes before it"
            elif reason := await self._launcher.admit(record.id, record.job_spec()):
                why[record.id] = reason
                if now - self._refused.setdefault(record.id, now) > BACKFILL_S:
                    first = record.id
        self._refused = {job_id: since for job_id, since in self._refused.items() if job_id in why}
        return why
