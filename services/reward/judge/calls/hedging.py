"""When a second server is asked the same because the first is late: the tail of latencies costs a step its end.

A call becomes late at a quantile of the latest latencies (Dean and Barroso, The Tail at Scale, 2013), and only where it
also takes much longer than usual: among latencies that are nearly equal some are always the longest, and a second call,
which takes as long as usual, would only cost the server a place.
"""

from __future__ import annotations

import bisect
import math
from collections import deque

from services.reward.remote.retries import ShareBudget

WINDOW = 512
LEAST = 20
"""Latencies that must be known before anything is called late."""
SLOW = 1.5
"""Times the median: what takes less is never late."""


class HedgePolicy:
    """No tasks and no I/O."""

    def __init__(self, quantile: float, budget: ShareBudget) -> None:
        self._quantile = quantile
        self._budget = budget
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, seconds: float) -> None:
        """A call was answered after so long."""
        self._budget.deposit()
        if len(self._latest) == WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]
        self._latest.append(seconds)
        bisect.insort(self._sorted, seconds)

    @property
    def delay_s(self) -> float | None:
        """After so long a call is late; None while too little is known."""
        known = len(self._sorted)
        if known < LEAST:
            return None
        quantile = self._sorted[min(known - 1, math.ceil(self._quantile * known) - 1)]
        return max(quantile, SLOW * self._sorted[known // 2])

    def take(self) -> bool:
        """Whether a late call may be hedged: takes it out of the budget."""
        return self._budget.withdraw()
