"""How many answers could not be read. A judge that rambles must stop the job, not thin its groups in silence."""

from __future__ import annotations

from collections import OrderedDict

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
