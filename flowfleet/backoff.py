"""How long to wait before the next try of what failed."""

from __future__ import annotations


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Seconds after that many failures in a row: `first_s` after one, doubled by each further one up to `longest_s`."""
    return min(first_s * 2.0 ** min(failures - 1, 30), longest_s) if failures else 0.0
