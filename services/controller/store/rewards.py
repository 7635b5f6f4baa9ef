"""Revisions of a job's rewards, and the calls of all rewards as the leader sees them.

A change is a wish: the REST API writes the whole new set under the next number, and the driver of the job makes it an
event of the job's ledger (driver.py), in one transaction with what is written here. So it takes effect once,
whichever controller dies between wish and event.
"""

import json
from collections.abc import Mapping

from flowfleet.api.fleet import RewardLoad
from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.api.rewards import RewardRevision
from flowfleet.errors import Conflict, NotFound
from flowfleet.redis import keys
from services.controller.store.events import MAX_EVENTS, add_event, encode, notice
from services.controller.store.link import Linked, Pipe
from services.controller.store.reading import PENDING, REVISION, row_of, rows_of
from services.controller.store.records import from_epoch

LOAD_TTL_S = 30
FILE = "rewards.file."
"""Field of a job: the version of a service's file, by the service."""
_APPLY = """
if redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[1], 'rewards.active', ARGV[2])
if redis.call('HGET', KEYS[1], 'rewards.revision') == ARGV[1] then redis.call('HDEL', KEYS[1], 'rewards.pending') end
if ARGV[5] ~= '' then
  local steps = cjson.decode(redis.call('HGET', KEYS[1], 'progress.rewards_changed') or '[]')
  table.insert(steps, tonumber(ARGV[5]))
  redis.call('HSET', KEYS[1], 'progress.rewards_changed', cjson.encode(steps))
end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', 'type', 'rewards', 'data', ARGV[3])
"""


class Rewards(Linked):
    async def change(self, job_id: str, revision: RewardRevision) -> None:
        """Records the wish for a revision, in place of one that is pending. The same one again does nothing.

        Raises NotFound, and Conflict when the job has ended, is being cancelled, or has a newer revision than the one
        that this follows.
        """
        wanted = revision.model_copy(update={"requested_at": from_epoch(await self._link.now())})

        async def attempt(pipe: Pipe) -> None:
            status, desired, number = await pipe.hmget(keys.job(job_id), "status", "desired", REVISION)
            check_changeable(job_id, status, desired)
            newest = int(number or 0)
            if newest != revision.number - 1:
                raise stale(revision.number - 1, newest)
            pipe.multi()
            pipe.hset(keys.job(job_id), mapping={REVISION: revision.number, PENDING: wanted.model_dump_json()})
            add_event(pipe, job_id, "request", {"action": "rewards", "number": revision.number})

        await self._link.transaction(attempt, keys.job(job_id))

    async def pending(self, job_id: str) -> RewardRevision | None:
        """Rewards of the steps that are not open yet."""
        row = await self._redis.hget(keys.job(job_id), PENDING)
        return None if row is None else row_of(RewardRevision, row)

    async def apply(self, job_id: str, revision: RewardRevision, pipe: Pipe, *, is_break: bool = False) -> None:
        """Adds to a transaction that a revision, with its first step, is what the job has. Done again it does nothing,
        and a wish that is newer stays. `is_break`: totals of other steps are not comparable."""
        applied = revision.model_copy(update={"applied_at": from_epoch(await self._link.now())})
        told = applied.model_dump(mode="json", include={"number", "from_step", "changes", "rewards", "shadows"})
        names = keys.job(job_id), keys.rewards(job_id), keys.events(job_id)
        break_at = applied.from_step if is_break and applied.from_step is not None else ""
        pipe.eval(_APPLY, 3, *names, applied.number, applied.model_dump_json(), encode(told), MAX_EVENTS, break_at)
        set_again = (n for n in applied.rewards if any(line.startswith(f"set {n} ") for line in applied.changes))
        for name in set_again:  # with whatever file it has
            pipe.hdel(keys.job(job_id), FILE + (applied.rewards[name].get("service") or name))
        notice(pipe, job_id)

    async def file(self, job_id: str, service: str, found: str, *, accept: bool = False) -> str:
        """Version of a service's file by which the job is scored: the first one, or one that was accepted since."""
        store = self._redis.hset if accept else self._redis.hsetnx
        await store(keys.job(job_id), FILE + service, found)
        return (await self._redis.hget(keys.job(job_id), FILE + service) or b"").decode()

    async def history(self, job_id: str) -> list[RewardRevision]:
        """Returns the revisions that took effect, ascending, without the submitted one."""
        rows = await self._redis.hvals(keys.rewards(job_id))
        return sorted(rows_of(RewardRevision, rows), key=lambda revision: revision.number)

    async def put_load(self, load: Mapping[str, RewardLoad]) -> None:
        """Keeps the load of the rewards for a while, as the controller that runs jobs sees it."""
        rows = {name: one.model_dump(mode="json") for name, one in load.items()}
        await self._redis.set(keys.reward_load(), json.dumps(rows), ex=LOAD_TTL_S)

    async def load(self) -> dict[str, RewardLoad]:
        """Load by reward."""
        rows = json.loads(await self._redis.get(keys.reward_load()) or b"{}")
        return {name: one for name, row in rows.items() for one in rows_of(RewardLoad, [row])}


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
