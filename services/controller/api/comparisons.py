"""Comparisons of shadows, computed outside the event loop, and only when there is something new to compare."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from services.controller.rewards.comparison import Comparison, compare
from services.controller.store.jobs import JobStore
from services.controller.store.records import Purpose

MAX_KNOWN = 256
"""Comparisons that are kept."""


class Comparisons:
    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, Purpose], tuple[tuple[int, bytes], Comparison]] = OrderedDict()

    async def of(self, store: JobStore, job_id: str, pair: str, purpose: Purpose) -> Comparison:
        """Compares a pair over its newest groups."""
        key, mark = (job_id, pair, purpose), await store.shadow_mark(job_id, pair, purpose)
        if key not in self._known or self._known[key][0] != mark:
            groups = await store.shadow_scores(job_id, pair, purpose)
            self._known[key] = (mark, await asyncio.to_thread(compare, groups))
        self._known.move_to_end(key)
        found = self._known[key][1]
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return found
