"""How far the step at work is: samples made and scored, told as they grow and seldom enough that a job's events stay
few. Pure but for its clock."""

import time
from collections.abc import Callable
from typing import NamedTuple

from services.controller.job.machine.batch import Batch

SHOW_EVERY_S = 2.0
"""From one change of the job's record to the next."""
ANNOUNCE_EVERY_S = 10.0
ANNOUNCED_PARTS = 10
"""Events of a step at most: one for each tenth of it."""


class Counts(NamedTuple):
    """Fields of Progress."""

    samples: int = 0
    samples_sampled: int = 0
    samples_scored: int = 0


def counts_of(batch: Batch | None) -> Counts:
    """Samples of a step without the dropped ones; those that are scored are made as well."""
    if batch is None:
        return Counts()
    scored = batch.count("scored")
    made = scored + batch.count("sampled")
    return Counts(made + batch.count("wanted"), made, scored)


class ProgressTold:
    """Remembers what it told last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase, self._shown, self._announced = "", Counts(), Counts()
        self._shown_at = self._announced_at = float("-inf")

    def tells(self, phase: str, counts: Counts) -> bool | None:
        """Decides how to tell this, and notes it as told: True with an event, False in the job's record alone, None not
        yet. A new phase has an event, and so has another tenth of the step, if the last event is a while ago."""
        now = self._clock()
        is_new = phase != self._phase
        if not is_new and (counts == self._shown or now - self._shown_at < SHOW_EVERY_S):
            return None
        self._phase, self._shown, self._shown_at = phase, counts, now
        announce = is_new or (_part(counts) != _part(self._announced) and now - self._announced_at >= ANNOUNCE_EVERY_S)
        if announce:
            self._announced, self._announced_at = counts, now
        return announce


def _part(counts: Counts) -> int:
    return ANNOUNCED_PARTS * (counts.samples_sampled + counts.samples_scored) // max(1, 2 * counts.samples)
