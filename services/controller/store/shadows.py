"""Scores of a job's shadows: rewards that are tried, each next to the reward that it is compared with."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

from flowfleet.api.samples import Purpose
from flowfleet.redis import keys
from services.controller.rewards.comparison import GroupScores
from services.controller.store.link import Linked
from services.controller.store.reading import rows_of

MAX_GROUPS = 1024
"""Maximum number of groups of each pair of shadow and reward, and purpose; beyond it the oldest are deleted."""
SHADOW_TTL_S = 7 * 24 * 3600
"""Lifetime of scores by a shadow that was removed, promoted or changed."""
Count = Literal["scored", "failed", "left_out"]


class Shadows(Linked):
    async def add(self, job_id: str, pair: str, purpose: Purpose, groups: Sequence[GroupScores]) -> None:
        """Scores that a shadow and its reward gave some groups; `pair` names the two and their settings."""
        name = keys.shadow(job_id, pair, purpose)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.lpush(name, *(group.model_dump_json() for group in groups))
            pipe.ltrim(name, 0, MAX_GROUPS - 1)
            pipe.persist(name)
            await pipe.execute()

    async def scores(self, job_id: str, pair: str, purpose: Purpose) -> list[GroupScores]:
        """Scores of the newest groups, each once: if a group was scored again, the latest scores."""
        rows = await self._redis.lrange(keys.shadow(job_id, pair, purpose), 0, -1)
        return await asyncio.to_thread(_groups, rows)

    async def mark(self, job_id: str, pair: str, purpose: Purpose) -> tuple[int, bytes]:
        """Another one whenever `scores` would give something else: how many there are, and the newest."""
        name = keys.shadow(job_id, pair, purpose)
        async with self._redis.pipeline(transaction=True) as pipe:
            length, newest = await pipe.llen(name).lindex(name, 0).execute()
        return int(length), newest or b""

    async def count(self, job_id: str, pair: str, counts: Mapping[Count, int]) -> None:
        """Adds samples."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for name, number in counts.items():
                pipe.hincrby(keys.shadow(job_id, pair, "counts"), name, number)
            pipe.persist(keys.shadow(job_id, pair, "counts"))
            await pipe.execute()

    async def expire(self, job_id: str, pair: str) -> None:
        """The job has the shadow no more: what it gave is kept for a while, in case that it comes back."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for part in ("train", "validate", "counts"):
                pipe.expire(keys.shadow(job_id, pair, part), SHADOW_TTL_S)
            await pipe.execute()

    async def counts(self, job_id: str, pair: str) -> dict[str, int]:
        """Samples that were scored, failed, and left out because the shadow was behind; what never happened is
        missing."""
        row = await self._redis.hgetall(keys.shadow(job_id, pair, "counts"))
        return {name.decode(): int(number) for name, number in row.items()}


def _groups(rows: Sequence[bytes]) -> list[GroupScores]:
    """Newest rows first; of a group that was scored again, what came last."""
    found = rows_of(GroupScores, reversed(rows))
    return list({(group.step, group.group): group for group in found}.values())
