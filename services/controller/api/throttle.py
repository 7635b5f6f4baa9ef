"""Slows down callers who guess keys."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Final

from starlette.exceptions import HTTPException

from flowfleet.lru import LruCache

FREE: Final = 10
"""Wrong keys of an address within `PERIOD_S` that are answered at once."""
PERIOD_S: Final = 60.0
DELAY_S: Final = 1.0
AT_ONCE: Final = 64
"""Answers of an address that are delayed at a time. While they are, its further keys are refused without a look."""
_ADDRESSES: Final = 4096


class Throttle:
    """Counts the wrong keys of each address."""

    def __init__(self) -> None:
        self._wrong: LruCache[str, tuple[float, int]] = LruCache(_ADDRESSES)
        self._delayed: Counter[str] = Counter()

    def check(self, address: str) -> None:
        """Raises HTTPException 429 for an address that sends many wrong keys at once."""
        if self._delayed[address] >= AT_ONCE:
            raise _too_many()

    async def note_wrong(self, address: str) -> None:
        """Counts a wrong key. Above the limit it waits, then raises HTTPException 429."""
        now = time.monotonic()
        since, number = self._wrong.get(address) or (now, 0)
        if now - since > PERIOD_S:
            since, number = now, 0
        self._wrong.put(address, (since, number + 1))
        if number < FREE:
            return
        self._delayed[address] += 1
        try:
            await asyncio.sleep(DELAY_S)
        finally:
            self._delayed[address] -= 1
            self._delayed += Counter()  # drops what is 0
        raise _too_many()


def _too_many() -> HTTPException:
    return HTTPException(429, "this address sent many wrong keys: wait a minute", {"Retry-After": f"{PERIOD_S:g}"})
