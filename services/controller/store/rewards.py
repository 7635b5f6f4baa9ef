"""Revisions of the job's rewards, and what its shadows gave. A part of JobStore.

A change is a wish: the REST API writes the whole new set under the next number, and the driver of the job makes it an
event of the job's ledger (driver.py), in one transaction with what is written here. So it takes effect once,
whichever controller dies between wish and event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from flowfleet.client.types import Desired, JobRewards, JobStatus, Purpose, RewardRevision
from flowfleet.errors import Conflict, NotFound
from flowfleet.process.clock import steady_time
from flowfleet.redis import keys
from services.controller.rewards.comparison import GroupScores
from services.controller.store.history import MAX_EVENTS, Pipe, add_event, encode
from services.controller.store.records import from_epoch
from services.controller.store.rows import notice

REVISION = "rewards.revision"
_ACTIVE, _PENDING = "rewards.active", "rewards.pending"

MAX_GROUPS = 1024
"""Maximum number of groups of each pair of shadow and reward, and purpose; beyond it the oldest are deleted."""
SHADOW_TTL_S = 7 * 24 * 3600
"""Lifetime of scores by a shadow that was removed, promoted or changed."""
Count = Literal["scored", "failed", "left_out"]

_APPLY = """
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[1], 'rewards.active', ARGV[2])
if redis.call('HGET', KEYS[1], 'rewards.revision') == ARGV[1] then redis.call('HDEL', KEYS[1], 'rewards.pending') end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', 'type', 'rewards', 'data', ARGV[3])
"""


class RewardRevisions:
    _redis: Any
    _clock: Callable[[], float]
    _transaction: Callable[[Callable[[Pipe], Awaitable[Any]], str], Awaitable[Any]]

    async def change_rewards(self, job_id: str, revision: RewardRevision) -> None:
        """Records the wish for a revision, in place of one that is pending. The same one again does nothing.

        Raises NotFound, and Conflict when the job has ended, is being cancelled, or has a newer revision than the one
        that this follows.
        """
        wanted = revision.model_copy(update={"requested_at": from_epoch(self._clock())})

        async def attempt(pipe: Pipe) -> None:
            status, desired, number = await pipe.hmget(keys.job(job_id), "status", "desired", REVISION)
            check_changeable(job_id, status, desired)
            newest = int(number or 0)
            if newest != revision.number - 1:
                raise stale(revision.number - 1, newest)
            pipe.multi()
            pipe.hset(keys.job(job_id), mapping={REVISION: revision.number, _PENDING: wanted.model_dump_json()})
            add_event(pipe, job_id, "request", {"action": "rewards", "number": revision.number})

        await self._transaction(attempt, keys.job(job_id))

    async def pending_rewards(self, job_id: str) -> RewardRevision | None:
        """Rewards of the steps that are not open yet."""
        row = await self._redis.hget(keys.job(job_id), _PENDING)
        return None if row is None else RewardRevision.model_validate_json(row)

    async def apply_rewards(self, job_id: str, revision: RewardRevision, pipe: Pipe) -> None:
        """Adds to a transaction that a revision, with its first step, is what the job has. Done again it does nothing,
        and a wish that is newer stays."""
        applied = revision.model_copy(update={"applied_at": from_epoch(steady_time())})
        told = applied.model_dump(mode="json", include={"number", "from_step", "changes", "rewards", "shadows"})
        names = keys.job(job_id), keys.rewards(job_id), keys.events(job_id)
        pipe.eval(_APPLY, 3, *names, applied.number, applied.model_dump_json(), encode(told), MAX_EVENTS)
        notice(pipe, job_id)

    async def reward_history(self, job_id: str) -> list[RewardRevision]:
        """What took effect, ascending, without what was submitted."""
        rows = await self._redis.hvals(keys.rewards(job_id))
        return sorted((RewardRevision.model_validate_json(row) for row in rows), key=lambda revision: revision.number)

    # -- shadows -------------------------------------------------------------------------------------------------

    async def add_shadow_scores(self, job_id: str, pair: str, purpose: Purpose, groups: Sequence[GroupScores]) -> None:
        """Scores that a shadow and its reward gave some groups; `pair` names the two and their settings."""
        name = keys.shadow(job_id, pair, purpose)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.lpush(name, *(group.model_dump_json() for group in groups))
            pipe.ltrim(name, 0, MAX_GROUPS - 1)
            pipe.persist(name)
            await pipe.execute()

    async def shadow_scores(self, job_id: str, pair: str, purpose: Purpose) -> list[GroupScores]:
        """Scores of the newest groups, each once: if a group was scored again, the latest scores."""
        rows = await self._redis.lrange(keys.shadow(job_id, pair, purpose), 0, -1)
        return await asyncio.to_thread(_groups, rows)

    async def shadow_mark(self, job_id: str, pair: str, purpose: Purpose) -> tuple[int, bytes]:
        """Another one whenever `shadow_scores` would give something else: how many there are, and the newest."""
        name = keys.shadow(job_id, pair, purpose)
        async with self._redis.pipeline(transaction=True) as pipe:
            length, newest = await pipe.llen(name).lindex(name, 0).execute()
        return int(length), newest or b""

    async def count_shadow(self, job_id: str, pair: str, counts: Mapping[Count, int]) -> None:
        """Adds samples."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for name, number in counts.items():
                pipe.hincrby(keys.shadow(job_id, pair, "counts"), name, number)
            pipe.persist(keys.shadow(job_id, pair, "counts"))
            await pipe.execute()

    async def expire_shadow(self, job_id: str, pair: str) -> None:
        """The job has the shadow no more: what it gave is kept for a while, in case that it comes back."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for part in ("train", "validate", "counts"):
                pipe.expire(keys.shadow(job_id, pair, part), SHADOW_TTL_S)
            await pipe.execute()

    async def shadow_counts(self, job_id: str, pair: str) -> dict[str, int]:
        """Samples that were scored, failed, and left out because the shadow was behind; what never happened is
        missing."""
        row = await self._redis.hgetall(keys.shadow(job_id, pair, "counts"))
        return {name.decode(): int(number) for name, number in row.items()}


def _groups(rows: Sequence[bytes]) -> list[GroupScores]:
    """Newest rows first; of a group that was scored again, what came last."""
    found = [GroupScores.model_validate_json(row) for row in reversed(rows)]
    return list({(group.step, group.group): group for group in found}.values())


def check_changeable(job_id: str, status: bytes | None, desired: bytes | None) -> None:
    """Raises NotFound or Conflict."""
    if status is None or desired is None:
        raise NotFound(f"no job {job_id}")
    if JobStatus(status.decode()).terminal:
        raise Conflict(
            f"the job has ended as {status.decode()}: its rewards cannot change; submit it again with others"
        )
    if desired.decode() == Desired.CANCELLED:
        raise Conflict("the job is being cancelled: its rewards cannot change")


def stale(base: int, newest: int) -> Conflict:
    """Conflict of a change that was made without knowing of another one."""
    return Conflict(
        f"revision: the change builds on {base}, and the job's rewards are at {newest} by now: look at them, and send "
        f"the change with revision {newest} if it is still right"
    )


def rewards_of(fields: Mapping[str, str]) -> JobRewards:
    """From the fields of a job's hash; of a job whose rewards never changed, what was submitted."""
    if (row := fields.get(_ACTIVE)) is not None:
        active = RewardRevision.model_validate_json(row)
    else:
        created = from_epoch(float(fields["created_at"]))
        submitted = json.loads(fields["spec"])["rewards"]
        active = RewardRevision(number=0, rewards=submitted, requested_at=created, from_step=0, applied_at=created)
    pending = fields.get(_PENDING)
    return JobRewards(
        revision=int(fields.get(REVISION, 0)),
        active=active,
        pending=None if pending is None else RewardRevision.model_validate_json(pending),
    )
