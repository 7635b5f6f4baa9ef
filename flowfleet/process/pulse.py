"""Watch over the work of a process's threads. The process's health shows it to whoever kills and restarts the process.

A thread that lives may be stuck all the same, in a kernel, a driver or a library. So the working thread itself reports
progress: at the start and the end of each piece of work, and by `beat` in between. Work without progress for longer
than its limit is stuck:

    patient_s   loading, compiling, and work that is heavier than any before, which may compile or tune kernels
    hang_s      all other work, or four times the longest gap between two beats so far, if that is longer

So a slow machine is not taken for a stuck one, and the first piece of work of a kind is given its time.
"""

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

HANG_S: Final = 120.0
"""Default of `flowfleet up`, of the chart, and of a job's `timeouts.hang_s`."""
PATIENT_S: Final = 900.0
SLACK: Final = 4.0
"""A gap may be so many times as long as the longest so far."""


def add_pulse_arguments(flags: argparse.ArgumentParser, hang_s: float = HANG_S) -> None:
    """Adds the flags of a service with a `Pulse`."""
    for flag, default, text in (
        ("--hang-s", hang_s, "work without progress for so long makes it unhealthy"),
        ("--stall-s", PATIENT_S, "the same while it loads, compiles or warms up"),
    ):
        flags.add_argument(flag, type=_seconds, default=default, help=text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


@dataclass(eq=False)
class _Work:
    thread: int
    is_patient: bool
    last: float
    """When it last got on."""


class Pulse:
    """Keeps when the work that is open last got on. Thread-safe.

    With `shared`, one thread asks for work and another does it, piece by piece: progress of any counts for all.
    """

    def __init__(
        self,
        hang_s: float = HANG_S,
        patient_s: float = PATIENT_S,
        *,
        shared: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hang_s, self._clock = hang_s, clock
        self.patient_s = max(hang_s, patient_s)
        """Limit of loading, compiling and first work."""
        self._shared = shared
        self._lock = threading.Lock()
        self._open: list[_Work] = []
        self._compiling = 0
        self._longest_s = 0.0
        self._heaviest: dict[str, float] = {}

    @contextmanager
    def work(self, kind: str, weight: float = 1.0, *, patient: bool = False) -> Iterator[None]:
        """Around work where it is done; with `shared` also where it is asked for. `weight`: how much there is to do
        before the next beat, compared with other work of its kind."""
        with self._lock:
            is_heavy = weight > self._heaviest.get(kind, 0.0)
            work = _Work(threading.get_ident(), patient or is_heavy, self._clock())
            self._open.append(work)
        try:
            yield
            with self._lock:
                self._heaviest[kind] = max(self._heaviest.get(kind, 0.0), weight)
        finally:
            with self._lock:
                self._got_on(counts=not patient)
                self._open.remove(work)

    def beat(self) -> None:
        """The work of this thread got on."""
        with self._lock:
            self._got_on()

    def reset(self) -> None:
        """Another model is loaded: nothing that was measured holds for it."""
        with self._lock:
            self._heaviest.clear()
            self._longest_s = 0.0

    def compiling(self, is_compiling: bool) -> None:
        """A compilation begins in this thread, or has ended. They may nest."""
        with self._lock:
            self._got_on(counts=is_compiling)
            self._compiling += 1 if is_compiling else -1

    def stalled_s(self) -> float:
        """The longest time for which open work has not got on; 0 without work."""
        with self._lock:
            return max((stalled_s for stalled_s, _ in self._stalls()), default=0.0)

    @property
    def is_stuck(self) -> bool:
        """True if work has made no progress for longer than its limit."""
        with self._lock:
            return any(stalled_s > self._limit_s(is_patient) for stalled_s, is_patient in self._stalls())

    def _stalls(self) -> Iterator[tuple[float, bool]]:
        """How long each piece of work, or all shared work, has made no progress, and whether it is patient."""
        now = self._clock()
        if not self._shared:
            yield from ((now - work.last, work.is_patient) for work in self._open)
        elif self._open:
            yield now - max(work.last for work in self._open), any(work.is_patient for work in self._open)

    def _limit_s(self, is_patient: bool) -> float:
        if is_patient or self._compiling:
            return self.patient_s
        return max(self._hang_s, min(SLACK * self._longest_s, self.patient_s))

    def _got_on(self, *, counts: bool = True) -> None:
        """`counts`: the gap that ends here is one of ordinary work."""
        now, thread = self._clock(), threading.get_ident()
        mine = [work for work in self._open if self._shared or work.thread == thread]
        if mine and counts and not self._compiling:
            self._longest_s = max(self._longest_s, now - max(work.last for work in mine))
        for work in mine:
            work.last = now
