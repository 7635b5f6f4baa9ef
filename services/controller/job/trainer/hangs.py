"""Decides if a trainer hangs, from what its ranks report of themselves. Pure: it gets the time and the reports.

rule 1   A trainer at work hangs when no rank's phase or count has changed for longer than the largest limit of the
         phases that its ranks are in. One rank that gets on is enough: the others may wait for it in a collective.
         Named are those at work, or those that were silent for most of that time, for whom the others wait.
rule 2   A rank hangs when it has given no sign for longer than its phase allows silence, at work or not: it is
         stopped. That is `hang_s`, but where the phase may keep the interpreter's lock. While rank 0 does not answer,
         it alone is silent, for the signs of others come by it.
rule 3   Time without a check does not count: a controller that was suspended accuses no rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

IDLE = "idle"
QUIET_S = 10.0
"""A rank that is silent for so long, or for half of what its phase allows, is named in the job's reason."""
MAX_GAP_S = 3.0
"""The most that one look adds to how long something has lasted."""


@dataclass(frozen=True)
class Progress:
    """Progress that a rank last showed; see RankProgress in trainer.proto."""

    rank: int
    phase: str
    limit_s: float
    count: int
    signs: int
    silence_s: float


class HangJudge:
    """Judges one trainer from its start. `hang_s` is the limit of rank 0 until it has answered."""

    def __init__(self, hang_s: float) -> None:
        self._shown = {0: Progress(0, "start", hang_s, 0, 0, hang_s)}
        self._silent_s = {0: 0.0}
        self._still_s = 0.0
        self._looked: float | None = None

    def look(self, now: float, heard: Sequence[Progress] | None) -> str | None:
        """Why the trainer hangs, in words; None while it does not. `now` is of a monotonic clock, in seconds; `heard`
        is None when rank 0 did not answer."""
        passed = 0.0 if self._looked is None else min(max(0.0, now - self._looked), MAX_GAP_S)
        self._looked = now
        self._still_s += passed
        for rank in [0] if heard is None else self._shown:
            self._silent_s[rank] += passed
        for progress in heard or ():
            self._hear(progress)
        return self._silent() or self._still()

    @property
    def doubt(self) -> str:
        """Which ranks are silent and not yet too long, without figures that change; empty where none is."""
        quiet = [one for one in self._shown.values() if self._silent_s[one.rank] > min(QUIET_S, one.silence_s / 2)]
        if not quiet:
            return ""
        allowed = min(one.silence_s for one in quiet)
        return f"{_names(quiet)} gives no sign: the trainer is replaced if that lasts {allowed:g} s"

    def _hear(self, progress: Progress) -> None:
        before = self._shown.get(progress.rank)
        self._shown[progress.rank] = progress
        if before is None or progress.signs != before.signs:
            self._silent_s[progress.rank] = 0.0
        if before is None or (progress.phase, progress.count) != (before.phase, before.count):
            self._still_s = 0.0

    def _silent(self) -> str | None:
        stopped = [one for one in self._shown.values() if self._silent_s[one.rank] > one.silence_s]
        return self._no_sign(stopped) if stopped else None

    def _still(self) -> str | None:
        at_work = [one for one in self._shown.values() if one.phase != IDLE]
        if not at_work:
            self._still_s = 0.0
            return None
        if self._still_s <= max(one.limit_s for one in at_work):
            return None
        if stopped := [one for one in self._shown.values() if self._silent_s[one.rank] > self._still_s / 2]:
            return self._no_sign(stopped)
        return f"{_names(at_work)} made no progress for {self._still_s:.0f} s"

    def _no_sign(self, stopped: Sequence[Progress]) -> str:
        return f"{_names(stopped)} gave no sign for {max(self._silent_s[one.rank] for one in stopped):.0f} s"


def _names(ranks: Sequence[Progress]) -> str:
    return ", ".join(f"rank {one.rank} (phase {one.phase})" for one in sorted(ranks, key=lambda one: one.rank))
