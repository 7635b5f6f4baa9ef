"""Slows down callers who guess keys."""

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
"""Answers of an address that are delayed at a time. While they are, its further wrong keys are refused at once."""
_ADDRESSES: Final = 4096


class Throttle:
    """Counts the wrong keys of each address."""

    def __init__(self) -> None:
        self._wrong: LruCache[str, tuple[float, int]] = LruCache(_ADDRESSES)
        self._delayed: Counter[str] = Counter()

    async def note_wrong(self, address: str) -> None:
        """Counts a wrong key. Above the limit it waits, then raises HTTPException 429."""
        now = time.monotonic()
        since, number = self._wrong.get(address) or (now, 0)
        if now - since > PERIOD_S:
            since, number = now, 0
        self._wrong.put(address, (since, number + 1))
        if number < FREE:
            return
        if self._delayed[address] < AT_ONCE:
            self._delayed[address] += 1
            try:
                await asyncio.sleep(DELAY_S)
            finally:
                self._delayed[address] -= 1
                self._delayed += Counter()  # drops what is 0
        words = "this key opens nothing, nor did many others from this address: check it, then try again in a minute"
        raise HTTPException(429, words, {"Retry-After": f"{PERIOD_S:g}"})
