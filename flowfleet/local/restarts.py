"""When a process that died is started again. Pure, with the caller's clock."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 15.0
STABLE_AFTER_S = 30.0
"""A process that ran this long starts over with the shortest delay."""


@dataclass
class Backoff:
    """Doubles the delay each time a process dies young."""

    delay_s: float = FIRST_DELAY_S

    def after(self, ran_for_s: float) -> float:
        """Seconds to wait before the next start of a process that ran for `ran_for_s`."""
        if ran_for_s >= STABLE_AFTER_S:
            self.delay_s = FIRST_DELAY_S
        delay_s, self.delay_s = self.delay_s, min(2 * self.delay_s, LONGEST_DELAY_S)
        return delay_s
