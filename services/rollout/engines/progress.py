"""Whether an engine that runs in another thread makes progress."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Counts what is asked of a thread, and what it has in hand, and keeps when it last got on. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._last = 0.0
        self.is_dead = False
        """Set it once the thread can do nothing any more."""

    @contextmanager
    def work(self) -> Iterator[None]:
        """Around work that is asked for, and around the same work where it is done."""
        with self._lock:
            if self._open == 0:
                self._last = time.monotonic()
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                self._last = time.monotonic()

    def beat(self) -> None:
        """The work got on."""
        self._last = time.monotonic()

    def stalled_s(self) -> float:
        """Seconds since any work last got on; 0 without work, infinite for a dead thread."""
        if self.is_dead:
            return math.inf
        return time.monotonic() - self._last if self._open else 0.0
