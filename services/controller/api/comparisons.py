"""Comparisons of shadows, computed outside the event loop, and only when there is something new to compare."""

from __future__ import annotations

import asyncio

from flowfleet.api.rewards import Comparison
from flowfleet.api.samples import Purpose
from flowfleet.lru import LruCache
from services.controller.rewards.comparison import compare
from services.controller.store.store import Store

MAX_KNOWN = 256
"""Comparisons that are kept."""


class Comparisons:
    def __init__(self) -> None:
        self._known: LruCache[tuple[str, str, Purpose], tuple[tuple[int, bytes], Comparison]] = LruCache(MAX_KNOWN)

    async def of(self, store: Store, job_id: str, pair: str, purpose: Purpose) -> Comparison:
        """Compares a pair over its newest groups."""
        key, mark = (job_id, pair, purpose), await store.shadows.mark(job_id, pair, purpose)
        known = self._known.get(key)
        if known is None or known[0] != mark:
            groups = await store.shadows.scores(job_id, pair, purpose)
            known = mark, await asyncio.to_thread(compare, groups)
            self._known.put(key, known)
        return known[1]
