"""How many calls one server may have at a time: additive increase, multiplicative decrease (as TCP).

The limit up to doubles a round trip until the server first slows, then grows by one a round trip. A call that took
longer than the target, timed out or was refused as too many (429, 503) cuts it, once for all calls that were under way
at the cut: they tell of the same crowd. It grows only while it is used, so that quiet hours do not earn a storm.
"""

from __future__ import annotations

import math
from collections.abc import Callable

DECREASE = 0.7
"""Factor by which a cut lowers the limit."""


class AimdLimiter:
    """No tasks and no I/O; `clock` gives seconds."""

    def __init__(self, initial: int, maximum: int, target_s: float, clock: Callable[[], float]) -> None:
        """target_s: a call that takes longer is a sign of crowding."""
        self._maximum = maximum
        self._target_s = target_s
        self._clock = clock
        self._limit = float(min(initial, maximum))
        self._doubling = True
        self._last_cut = -math.inf
        self.in_flight = 0

    @property
    def limit(self) -> int:
        """Calls at a time, at least 1."""
        return int(self._limit)

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.limit

    def acquire(self) -> float:
        """Takes a place and returns the time, which goes back to `release`."""
        assert self.has_room, "the caller asks has_room first"
        self.in_flight += 1
        return self._clock()

    def release(self, began: float, *, crowded: bool = False, counts: bool = True) -> None:
        """Gives the place back. `crowded`: it timed out or was refused as too many. `counts`: False for a call that
        tells nothing of the load: it was cancelled, or the server was not reached."""
        used = self.in_flight
        self.in_flight -= 1
        now = self._clock()
        if not counts:
            return
        if crowded or now - began > self._target_s:
            self._cut(began, now)
        elif 2 * used >= self.limit:
            self._limit = min(float(self._maximum), self._limit + (1.0 if self._doubling else 1.0 / self._limit))

    def _cut(self, began: float, now: float) -> None:
        if began < self._last_cut:
            return
        self._limit = max(1.0, self._limit * DECREASE)
        self._last_cut = now
        self._doubling = False
