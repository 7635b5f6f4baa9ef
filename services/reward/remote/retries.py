"""How much may be retried, and how long to wait before: retries must not become the storm that they answer.

Every call pays a share into the budget and every retry takes one out (as Finagle's RetryBudget), so that retries are
at most that share of all calls in the long run.
"""

import random
from typing import Final

from flowfleet.backoff import backoff_s

RESERVE: Final = 10


class ShareBudget:
    """At most `share` of the calls, and `RESERVE` more at the start and after quiet times."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._most = RESERVE if share > 0.0 else 0.0
        self._balance = self._most

    def deposit(self) -> None:
        """A call began."""
        self._balance = min(self._most + self._share, self._balance + self._share)

    def withdraw(self) -> bool:
        """Takes one out; False where there is none."""
        if self._balance < 1.0 - 1e-9:
            return False
        self._balance -= 1.0
        return True


def retry_s(attempt: int, first_s: float, longest_s: float, asked_s: float | None, draw: random.Random) -> float:
    """Seconds before retry number `attempt` (from 0): uniform below an exponential bound ("full jitter"), after what
    the server itself asked for (Retry-After)."""
    return (asked_s or 0.0) + draw.uniform(0.0, backoff_s(attempt + 1, first_s, longest_s))
