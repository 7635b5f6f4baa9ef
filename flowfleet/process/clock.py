"""Unix time that does not jump while a process runs: the wall clock at its start, and the monotonic clock since.

For what is decided by an age, or measured as a difference. Times that people read may be the wall clock's.
"""

import time

_OFFSET_S = time.time() - time.monotonic()


def steady_time() -> float:
    """Seconds since the epoch."""
    return _OFFSET_S + time.monotonic()
