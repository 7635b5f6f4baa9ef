"""How long to wait before the next try of what failed."""

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

MAX_RETRY_AFTER_S: Final = 30.0
"""Longest time for which a server's wish is followed."""


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Seconds after that many failures in a row: `first_s` after one, doubled by each further one up to `longest_s`."""
    return min(first_s * 2.0 ** min(failures - 1, 30), longest_s) if failures else 0.0


def retry_after_s(header: str | None) -> float | None:
    """Seconds to wait that a server asks for by Retry-After, in seconds or as a date; None where it asks for none."""
    try:
        seconds = float(header or "")
    except ValueError:
        try:
            at = parsedate_to_datetime(header or "")
        except ValueError:
            return None
        seconds = (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(MAX_RETRY_AFTER_S, max(0.0, seconds)) if seconds == seconds else None
