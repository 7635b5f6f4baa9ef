"""How many answers could not be read. A judge that rambles must stop the job, not thin its groups in silence."""

from __future__ import annotations

from collections import deque

WINDOW = 200
LEAST = 20
"""Answers that must be known before their share is judged."""


class FailureShare:
    """The share over the latest `WINDOW` answers."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._latest: deque[bool] = deque(maxlen=WINDOW)
        self._failures = 0

    def observe(self, failed: bool) -> None:
        if len(self._latest) == WINDOW:
            self._failures -= self._latest[0]
        self._latest.append(failed)
        self._failures += failed

    @property
    def excess(self) -> str:
        """ "31 of the last 200 answers" where that is more than the limit; else nothing."""
        number = len(self._latest)
        if number < LEAST or self._failures <= self._limit * number:
            return ""
        return f"{self._failures} of the last {number} answers"
