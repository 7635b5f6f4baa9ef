"""How ended jobs leave Redis: what keeper.py reads of them, and the changes that it makes.

A job is removed in two steps. One transaction takes its record from Redis and from the indexes, and notes the id among
the leftovers; from then on there is no such job. Its other keys are cleared by the id, at once and a second time later,
because a replica may still write what it began. A controller that dies in between leaves the id to its successor. The
same list clears what an ended job only needed while it ran.
"""

import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.api.samples import Purpose
from flowfleet.redis import keys
from services.controller.store.events import notice
from services.controller.store.link import Linked, Pipe

LATE_S = 600.0
"""Seconds after which leftovers are cleared again."""
HELD_S = 60
FILES = "delete_files"
"""Field of the record of a job whose files go with it."""
BATCH = 500
WORKING = frozenset({"state", "ledger", "refs", "train", "held", "trajectories"})
"""Parts of a job's keys that only a running job needs."""
_DEAD = b"trajectories:dead"
_JOB = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_UPLOAD = re.compile(rb"upload:([0-9a-f]{64})/")


@dataclass(frozen=True)
class EndedJob:
    """Ended job, as far as retention needs it. Times are Unix seconds."""

    job_id: str
    ended_at: float
    wanted_gone: bool
    """Its user asked to delete it."""
    archive: str
    with_files: bool = False
    """Its files go with it."""


@dataclass(frozen=True)
class Leftover:
    job_id: str
    again: bool
    """It was cleared once."""

    @property
    def member(self) -> str:
        return f"{int(self.again)}/{self.job_id}"


class Removal(Linked):
    async def ended(self, among: Sequence[str] | None = None) -> list[EndedJob]:
        """Jobs that have ended, among these or of all, the one that ended first first."""
        ids = among
        if ids is None:
            ids = [name.decode() for name in await self._redis.zunion([keys.jobs_with_status(s) for s in _TERMINAL])]
        fields = ("ended_at", "desired", "archive", FILES)
        rows = await self._link.each(ids, lambda pipe, job_id: pipe.hmget(keys.job(job_id), fields))
        found = [
            EndedJob(job_id, _time(at), desired == Desired.DELETED.encode(), (archive or b"").decode(), bool(files))
            for job_id, (at, desired, archive, files) in zip(ids, rows, strict=True)
            if at is not None
        ]
        return sorted(found, key=lambda job: (job.ended_at, job.job_id))

    async def named_uploads(self) -> set[str]:
        """Digests of the uploads that a job names, ended or not."""
        return await self._named(_UPLOAD, await self.known())

    async def named_jobs(self) -> set[str]:
        """Jobs that one that has not ended names, to start from their files."""
        open_ids = await self._redis.zunion([keys.jobs_with_status(s) for s in JobStatus if not s.terminal])
        return await self._named(_JOB, [job_id.decode() for job_id in open_ids])

    async def known(self) -> list[str]:
        """Lists the jobs that are not removed."""
        return [job_id.decode() for job_id in await self._redis.zrange(keys.jobs(), 0, -1)]

    async def age_folders(self, folders: Collection[str], in_use: Collection[str], seconds: float) -> dict[str, float]:
        """Adds to how long folders of jobs that this Redis has removed have been seen unused, and forgets those that
        are gone. No clock that jumps makes them older; a folder of another Redis's job has no age."""
        before = await self._redis.hgetall(keys.removed())
        there = {job_id: float(age) for job_id, age in before.items() if job_id.decode() in folders}
        ages = {name.decode(): 0.0 if name.decode() in in_use else age + seconds for name, age in there.items()}

        def put(pipe: Pipe) -> None:
            pipe.delete(keys.removed())
            if ages:
                pipe.hset(keys.removed(), mapping=ages)

        await self._link.write(put)
        return ages

    async def _named(self, pattern: re.Pattern[bytes], job_ids: Sequence[str]) -> set[str]:
        """Lists what the specs of these jobs name."""
        found: set[str] = set()
        for start in range(0, len(job_ids), BATCH):
            batch = job_ids[start : start + BATCH]
            specs = await self._link.each(batch, lambda pipe, job_id: pipe.hget(keys.job(job_id), "spec"))
            found |= {name.decode() for spec in specs for name in pattern.findall(spec or b"")}
        return found

    async def history_bytes(self, job_id: str) -> int:
        """Bytes of Redis that the history of an ended job takes, from samples of its largest keys."""
        purposes: tuple[Purpose, ...] = ("train", "validate")
        samples = [keys.samples(job_id, p, part) for p in purposes for part in ("records", "order", "rewards")]
        groups = [keys.vote_groups(job_id, state) for state in ("waiting", "complete")]
        names = [keys.job(job_id), keys.events(job_id), keys.events_once(job_id), keys.metrics_steps(job_id), *samples]
        names += [*groups, keys.rewards(job_id), keys.validations(job_id), keys.checkpoints(job_id)]
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zcard(keys.metrics_steps(job_id))
            pipe.zrange(keys.metrics_steps(job_id), -1, -1)
            for name in groups:
                pipe.hlen(name)
                pipe.hrandfield(name, 1)
            count, steps, *voted = await pipe.execute()
            rows = [(int(count), keys.metrics(job_id, int(step))) for step in steps]
            rows += [
                (int(number), keys.votes(job_id, *map(int, place.split(b"/"))))
                for number, places in zip(voted[::2], voted[1::2], strict=True)
                for place in places
            ]
            for name in (*names, *(name for _, name in rows)):
                pipe.memory_usage(name, samples=20)
            sizes = [size or 0 for size in await pipe.execute()]
        each = zip(rows, sizes[len(names) :], strict=True)
        return sum(sizes[: len(names)]) + sum(number * size for (number, _), size in each)

    async def mark_archived(self, job_id: str, folder: str) -> None:
        """The job's archive is complete."""

        async def attempt(pipe: Pipe) -> None:
            there = await pipe.exists(keys.job(job_id))
            pipe.multi()
            if there:
                pipe.hset(keys.job(job_id), "archive", folder)

        await self._link.transaction(attempt, keys.job(job_id))

    async def remove(self, job_id: str, why: str) -> None:
        """Removes an ended job from sight; its other keys are among the leftovers then."""
        name, now = keys.job(job_id), await self._link.now()

        async def attempt(pipe: Pipe) -> None:
            status, archive, idempotency = await pipe.hmget(name, "status", "archive", "idempotency")
            if status is None or not JobStatus(status.decode()).terminal:
                return
            left_ms = await pipe.pttl(idempotency) if idempotency else 0
            where = f"; its archive is {archive.decode()}" if archive else ""
            pipe.multi()
            pipe.delete(name)
            for index in (keys.jobs(), *map(keys.jobs_with_status, _TERMINAL)):
                pipe.zrem(index, job_id)
            pipe.hset(keys.removed(), job_id, 0.0)
            leave(pipe, job_id, now)
            notice(pipe, job_id)
            if left_ms > 0:
                pipe.set(keys.tombstone(job_id), json.dumps({"reason": f"job {job_id} {why}{where}"}), px=left_ms)

        await self._link.transaction(attempt, name)

    async def hold(self, reason: str) -> None:
        """Shows for a while why limits remove nothing."""
        await self._link.write(lambda pipe: pipe.set(keys.retention(), reason, ex=HELD_S))

    async def held(self) -> str:
        """Returns why limits remove nothing now; empty where they do."""
        return (await self._redis.get(keys.retention()) or b"").decode()

    async def exists(self, job_id: str) -> bool:
        return bool(await self._redis.exists(keys.job(job_id)))

    async def leftovers(self) -> list[Leftover]:
        """Leftovers to clear now."""
        found = await self._redis.zrangebyscore(keys.leftovers(), "-inf", await self._link.now())
        parts = [member.decode().partition("/") for member in found]
        return [Leftover(job_id, again == "1") for again, _, job_id in parts]

    async def clear(self, leftovers: Sequence[Leftover]) -> None:
        """Deletes all keys of removed jobs, and of the others what only a running job needs."""
        ids = {leftover.job_id for leftover in leftovers}
        kept = {job_id for job_id in ids if await self.exists(job_id)}
        batch: list[bytes] = []
        async for name in self._redis.scan_iter(match="ff:*", count=5000):
            if _is_left(name, ids, kept):
                batch.append(name)
            if len(batch) == BATCH:
                await self._unlink(batch)
                batch = []
        await self._unlink(batch)
        late = await self._link.now() + LATE_S

        def cleared(pipe: Pipe) -> None:
            pipe.zrem(keys.leftovers(), *(leftover.member for leftover in leftovers))
            again = [Leftover(leftover.job_id, True).member for leftover in leftovers if not leftover.again]
            if again:
                pipe.zadd(keys.leftovers(), dict.fromkeys(again, late))

        if leftovers:
            await self._link.write(cleared)

    async def _unlink(self, names: Sequence[bytes]) -> None:
        if names:
            await self._link.write(lambda pipe: pipe.unlink(*names))


def _time(stored: bytes) -> float:
    """A time that no release would write is never past: only its user removes the job."""
    try:
        return float(stored)
    except ValueError:
        return math.inf


_TERMINAL = tuple(status for status in JobStatus if status.terminal)


def leave(pipe: Pipe, job_id: str, now: float) -> None:
    """Adds to a transaction that the job's leftovers are to be cleared."""
    pipe.zadd(keys.leftovers(), {Leftover(job_id, False).member: now})


def _is_left(name: bytes, ids: Collection[str], kept: Collection[str]) -> bool:
    _, job_id, part, *_ = *name.split(b":", 2), b"", b""
    owner = job_id.decode()
    if owner not in ids:
        return False
    return owner not in kept or (part.split(b":")[0].decode() in WORKING and part != _DEAD)
