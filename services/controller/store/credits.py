"""Credits of the training samples in their update: advantage and ratio, 16 bytes per sample.

Each step is one field, kept as long as samples of that step or an earlier one.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from flowfleet.redis import keys
from services.controller.store.link import Linked

_ROW = np.dtype([("group", "<u4"), ("index", "<u4"), ("advantage", "<f4"), ("ratio", "<f4")])


@dataclass(frozen=True, slots=True)
class Trained:
    """Part of one sample in an update."""

    group: int
    index: int
    advantage: float
    ratio: float | None
    """exp of the mean change of its log-prob while the update trained on it; None where the loss has no ratio."""


class Credits(Linked):
    async def put(self, job_id: str, step: int, samples: Iterable[Trained]) -> None:
        """Records a step's samples; done again it replaces them."""
        rows = [(s.group, s.index, s.advantage, math.nan if s.ratio is None else s.ratio) for s in samples]
        await self._redis.hset(_name(job_id), str(step), np.array(rows, dtype=_ROW).tobytes())
        await self.forget(job_id)

    async def of_step(self, job_id: str, step: int) -> dict[tuple[int, int], Trained]:
        """Returns the credits of a step's samples, by (group, index)."""
        packed = await self._redis.hget(_name(job_id), str(step))
        rows = np.frombuffer(packed or b"", dtype=_ROW).tolist()
        return {
            (group, index): Trained(group, index, advantage, None if math.isnan(ratio) else ratio)
            for group, index, advantage, ratio in rows
        }

    async def forget(self, job_id: str) -> None:
        """Forgets the steps before the oldest sample."""
        oldest = await self._redis.zrange(keys.samples(job_id, "train", "order"), 0, 0)
        first = int(oldest[0].split(b"/")[0]) if oldest else 0
        if gone := [step for step in await self._redis.hkeys(_name(job_id)) if int(step) < first]:
            await self._redis.hdel(_name(job_id), *gone)


def _name(job_id: str) -> str:
    return keys.samples(job_id, "train", "credits")
