"""Circuit breaker of a server. After failures in a row no calls go to the server for a while, then one call tries it.

CLOSED ──failures in a row──► OPEN ──cool-down──► HALF_OPEN ──success──► CLOSED
                                ▲                     │
                                └───────failure───────┘   the cool-down doubles, to its maximum
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum


class BreakerState(Enum):
    CLOSED = "closed"
    """Calls go through."""
    HALF_OPEN = "half_open"
    """Lets one call at a time through, to try the server."""
    OPEN = "open"
    """No call goes through."""


class CircuitBreaker:
    """No tasks and no I/O; `clock` gives seconds."""

    def __init__(self, failures: int, cooldown_s: float, max_cooldown_s: float, clock: Callable[[], float]) -> None:
        """failures: in a row, after which it opens. cooldown_s: for how long, at first."""
        self._threshold = failures
        self._first_cooldown_s = cooldown_s
        self._max_cooldown_s = max(cooldown_s, max_cooldown_s)
        self._clock = clock
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._opened: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        if self._opened is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._clock() >= self._opened + self._cooldown_s else BreakerState.OPEN

    @property
    def allows(self) -> bool:
        """True if a call may begin now."""
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.HALF_OPEN and not self._probing)

    @property
    def wait_s(self) -> float:
        """Seconds until it will allow a call, as far as it knows; 0 where only a probe is waited for."""
        return 0.0 if self._opened is None else max(0.0, self._opened + self._cooldown_s - self._clock())

    def begin(self) -> bool:
        """A call begins; True if it is the probe, which goes back to the end of the call."""
        assert self.allows, "the caller asks allows first"
        self._probing = self._opened is not None
        return self._probing

    def succeed(self, probe: bool) -> None:
        """Records a success. Of calls that began before it opened, only the probe closes it."""
        if self._opened is None or probe:
            self._failures, self._opened, self._probing = 0, None, False
            self._cooldown_s = self._first_cooldown_s

    def fail(self, probe: bool) -> None:
        if probe:
            self._probing = False
            self._cooldown_s = min(2 * self._cooldown_s, self._max_cooldown_s)
            self._opened = self._clock()
        elif self._opened is None:
            self._failures += 1
            if self._failures >= self._threshold:
                self._opened = self._clock()

    def forget(self, probe: bool) -> None:
        """The call was cancelled: it tells nothing, and a probe may begin again."""
        if probe:
            self._probing = False


WINDOW = 200
LEAST = 20
"""Answers that must be known before their share is judged."""


class FailureShare:
    """The share over the latest `WINDOW` questions. One that is asked again counts once, by its last answer: the
    retries of a call can mend the share, and cannot make it worse."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._latest: OrderedDict[bytes, bool] = OrderedDict()
        self._failures = 0

    def observe(self, question: bytes, failed: bool) -> None:
        self._failures += failed - self._latest.pop(question, False)
        self._latest[question] = failed
        if len(self._latest) > WINDOW:
            self._failures -= self._latest.popitem(last=False)[1]

    @property
    def excess(self) -> str:
        """ "31 of the last 200 answers" where that is more than the limit; else nothing."""
        number = len(self._latest)
        if number < LEAST or self._failures <= self._limit * number:
            return ""
        return f"{self._failures} of the last {number} answers"
