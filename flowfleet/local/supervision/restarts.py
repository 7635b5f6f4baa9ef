"""When a process that died is started again. Pure, with the caller's clock."""

from __future__ import annotations

from dataclasses import dataclass

from flowfleet.backoff import backoff_s

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 15.0
STABLE_AFTER_S = 30.0
"""A process that ran this long starts over with the shortest delay."""


@dataclass
class Backoff:
    """Doubles the delay each time a process dies young."""

    failures: int = 0

    def after(self, ran_for_s: float) -> float:
        """Seconds to wait before the next start of a process that ran for `ran_for_s`."""
        self.failures = 1 if ran_for_s >= STABLE_AFTER_S else self.failures + 1
        return backoff_s(self.failures, FIRST_DELAY_S, LONGEST_DELAY_S)
