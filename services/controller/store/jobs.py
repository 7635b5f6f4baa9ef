"""Records of jobs: submitted, asked to pause, resume or stop, and their status."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flowfleet.api.jobs import Desired, JobStatus, Priority, Progress, SweepPart
from flowfleet.errors import Conflict, Gone, NotFound
from flowfleet.job.spec import JobSpec
from flowfleet.redis import keys
from services.controller.store.events import add_event, encode, notice
from services.controller.store.link import Linked, Pipe
from services.controller.store.lists import brief_of
from services.controller.store.reading import DATA_BYTES, REVISION, decoded, format_of, read_record
from services.controller.store.records import (
    FORMAT,
    Action,
    JobRecord,
    is_upgraded,
    new_job_id,
    next_desired,
    spec_digest,
)
from services.controller.store.removal import FILES, leave

_STEPS, _PROFILED = "steps.asked", "profiled.before"
_INPUTS = "inputs"
IDEMPOTENCY_TTL_S = 7 * 24 * 3600
_HOLD = """
if redis.call('HGET', KEYS[1], 'desired') == ARGV[1] then redis.call('HSET', KEYS[1], 'desired', ARGV[2]) end
"""


class Jobs(Linked):
    async def create(
        self,
        spec: JobSpec,
        idempotency_key: str | None = None,
        *,
        asked: JobSpec | None = None,
        owner: str = "",
        data_bytes: int = 0,
        sweep: SweepPart | None = None,
    ) -> tuple[JobRecord, bool]:
        """Queues a job. The same key with the same job gives the first one and False; with another job, Conflict.
        `asked`: the job as its user wrote it, where that is not `spec`; the key belongs to it. `owner`: who submits.
        `data_bytes`: size of its prompts, where a submit reads them. `sweep`: its part in one."""
        job_id, now = new_job_id(), await self._link.now()
        key = keys.idempotency(idempotency_key) if idempotency_key else keys.job(job_id)

        async def attempt(pipe: Pipe) -> tuple[str, bool]:
            if await pipe.exists(keys.job(job_id)):
                return job_id, True  # the answer to a first attempt was lost
            if idempotency_key and (earlier := await _submitted(pipe, key, asked or spec)) is not None:
                return earlier, False
            pipe.multi()
            if idempotency_key:
                pipe.set(key, json.dumps({"job": job_id, "digest": spec_digest(asked or spec)}), ex=IDEMPOTENCY_TTL_S)
                pipe.hset(keys.job(job_id), "idempotency", key)
            pipe.hset(keys.job(job_id), mapping={**_first_fields(spec, owner, now), DATA_BYTES: str(data_bytes)})
            if sweep is not None:
                pipe.hset(keys.job(job_id), "sweep", sweep.model_dump_json())
            for index in (keys.jobs(), keys.jobs_with_status(JobStatus.QUEUED)):
                pipe.zadd(index, {job_id: 0})
            add_event(pipe, job_id, "status", {"status": JobStatus.QUEUED, "previous": "", "reason": ""})
            return job_id, True

        found, created = await self._link.transaction(attempt, key)
        return await self.get(found), created

    async def find_submitted(self, spec: JobSpec, idempotency_key: str) -> JobRecord | None:
        """The job that `create` would give back for this key. Raises Conflict as `create` does."""
        job_id = await _submitted(self._redis, keys.idempotency(idempotency_key), spec)
        return None if job_id is None else await self.get(job_id)

    async def get(self, job_id: str) -> JobRecord:
        """Raises NotFound; Gone for a deleted job while its Idempotency-Key lives."""
        row = await self._redis.hgetall(keys.job(job_id))
        if not row and (stone := await self._redis.get(keys.tombstone(job_id))) is not None:
            raise Gone(json.loads(stone)["reason"])
        return read_record(job_id, decoded(row))

    async def statuses(self, job_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Status, desired state and priority of each job, as fields of its record, in one round trip. Raises
        NotFound."""
        names = ("status", "desired", "priority")
        rows = await self._link.each(job_ids, lambda pipe, job_id: pipe.hmget(keys.job(job_id), names))
        return [
            {
                "status": JobStatus(_present(job_id, status)),
                "desired": Desired(desired.decode()),
                "priority": (priority or b"normal").decode(),
            }
            for job_id, (status, desired, priority) in zip(job_ids, rows, strict=True)
        ]

    async def desired_state(self, job_id: str) -> tuple[Desired, int, int | None]:
        """Desired state of the job, the number of the newest revision of its rewards, and the training steps that its
        user asked for, if they did. Raises NotFound."""
        desired, number, steps = await self._redis.hmget(keys.job(job_id), "desired", REVISION, _STEPS)
        return Desired(_present(job_id, desired)), int(number or 0), None if steps is None else int(steps)

    async def status(self, job_id: str) -> JobStatus:
        """Raises NotFound or Gone."""
        status = await self._redis.hget(keys.job(job_id), "status")
        return (await self.get(job_id)).status if status is None else JobStatus(status.decode())

    async def active(self) -> list[str]:
        """Ids of the jobs that have not ended, oldest first; a full Redis gives them too."""
        found = await self._redis.zunion([keys.jobs_with_status(status) for status in JobStatus if not status.terminal])
        return [job_id.decode() for job_id in found]

    async def unended(self) -> list[JobRecord]:
        """Records of the jobs that have not ended, oldest first."""
        found = await self.active()
        rows = await self._link.each(found, lambda pipe, job_id: pipe.hgetall(keys.job(job_id)))
        known = zip(found, rows, strict=True)
        return [read_record(job_id, decoded(row)) for job_id, row in known if row]  # else just deleted

    async def set_status(self, job_id: str, status: str, reason: str = "", *, hold: bool = False) -> bool:
        """Changes the status and appends its event; False when nothing changed. `hold`: as `hold`. Raises Conflict when
        it has ended."""
        status, now = JobStatus(status), await self._link.now()
        assert status.known, status

        async def attempt(pipe: Pipe) -> bool:
            before, was_reason, started = await pipe.hmget(keys.job(job_id), "status", "reason", "started_at")
            previous = JobStatus(_present(job_id, before))
            if (previous, was_reason.decode()) == (status, reason):
                if hold:  # the user resumed it too early
                    pipe.multi()
                    await self.hold(job_id, pipe)
                    notice(pipe, job_id)
                return False
            if previous.terminal:
                raise Conflict(f"job {job_id} has ended as {previous}: it cannot become {status}")
            pipe.multi()
            pipe.hset(keys.job(job_id), mapping=_status_fields(status, reason, started is None, now))
            pipe.zrem(keys.jobs_with_status(previous), job_id)
            pipe.zadd(keys.jobs_with_status(status), {job_id: 0})
            add_event(pipe, job_id, "status", {"status": status, "previous": previous, "reason": reason})
            if hold or status is JobStatus.QUARANTINED:
                await self.hold(job_id, pipe)
            if status.terminal:
                leave(pipe, job_id, now)
            return True

        return bool(await self._link.transaction(attempt, keys.job(job_id)))

    async def request(self, job_id: str, action: Action, *, files: bool = False) -> JobRecord:
        """Records what the user wants; the runner looks. Asked again, it does nothing. `files`: a deleted
        job's files go as well. Raises NotFound, Conflict."""
        now = await self._link.now()

        async def attempt(pipe: Pipe) -> None:
            status, desired = await pipe.hmget(keys.job(job_id), "status", "desired")
            before = Desired(_present(job_id, desired))
            target = next_desired(JobStatus(status.decode()), before, action)
            if target == before and not files:
                return
            pipe.multi()
            if files:
                pipe.hset(keys.job(job_id), FILES, 1)
            pipe.hset(keys.job(job_id), "desired", target)
            if target != Desired.DELETED:  # the last status was the last event
                add_event(pipe, job_id, "request", {"action": action})
            else:
                leave(pipe, job_id, now)
                notice(pipe, job_id)

        await self.status(job_id)
        await self._link.transaction(attempt, keys.job(job_id))
        return await self.get(job_id)

    async def request_steps(self, job_id: str, steps: int) -> JobRecord:
        """Records how many training steps the user wants in all; 0: those that are done, which also resumes a
        paused job. Asked again, it does nothing. Raises NotFound, Conflict."""

        async def attempt(pipe: Pipe) -> None:
            fields = ("status", "desired", _STEPS, "progress.step")
            status, desired, before, done = await pipe.hmget(keys.job(job_id), *fields)
            check_steps(JobStatus(_present(job_id, status)), Desired(desired.decode()), int(done or 0), steps, before)
            if before is not None and int(before) == steps:
                return
            pipe.multi()
            pipe.hset(keys.job(job_id), _STEPS, steps)
            if steps == 0 and desired.decode() == Desired.PAUSED:
                pipe.hset(keys.job(job_id), "desired", Desired.RUNNING)
            asked: dict[str, Any] = {"action": "extend", "steps": steps} if steps else {"action": "finish"}
            add_event(pipe, job_id, "request", asked)

        await self.status(job_id)
        await self._link.transaction(attempt, keys.job(job_id))
        return await self.get(job_id)

    async def prioritize(self, job_id: str, priority: Priority) -> JobRecord:
        """Changes the priority of a job. Raises NotFound, Conflict where it has ended."""

        async def attempt(pipe: Pipe) -> None:
            status, before = await pipe.hmget(keys.job(job_id), "status", "priority")
            if (ended := JobStatus(_present(job_id, status))).terminal:
                raise Conflict(f"the job has ended as {ended}: it waits for nothing")
            pipe.multi()
            pipe.hset(keys.job(job_id), "priority", priority)
            if (before or b"normal").decode() != priority:
                add_event(pipe, job_id, "request", {"action": "priority", "priority": priority})

        await self.status(job_id)
        await self._link.transaction(attempt, keys.job(job_id))
        return await self.get(job_id)

    async def request_profile(self, job_id: str, steps: int) -> JobRecord:
        """Has the next training steps profiled. Raises NotFound, Conflict where the job has ended."""

        async def attempt(pipe: Pipe) -> None:
            status, done, phase = await pipe.hmget(keys.job(job_id), "status", "progress.step", "progress.phase")
            if (ended := JobStatus(_present(job_id, status))).terminal:
                raise Conflict(f"the job has ended as {ended}: it has no more steps to profile")
            first = int(done or 0) + (phase == b"train")  # a step that is being trained on began without
            pipe.multi()
            pipe.hset(keys.job(job_id), _PROFILED, first + steps)
            add_event(pipe, job_id, "request", {"action": "profile", "steps": steps})

        await self.status(job_id)
        await self._link.transaction(attempt, keys.job(job_id))
        return await self.get(job_id)

    async def profiled_before(self, job_id: str) -> int:
        """Training steps below this one are profiled; those that ended are not asked for again."""
        return int(await self._redis.hget(keys.job(job_id), _PROFILED) or 0)

    async def hold(self, job_id: str, pipe: Pipe) -> None:
        """Adds to a transaction that the job pauses until its user resumes it, unless it is being cancelled.
        The job's machine pauses by the event of the same transaction, so a wish that is read later knows of it."""
        pipe.eval(_HOLD, 1, keys.job(job_id), Desired.RUNNING, Desired.PAUSED)

    async def update_progress(self, job_id: str, *, announce: bool = True, **fields: Any) -> None:
        """Sets these fields of Progress, the others stay. ValueError for one it has not; `announce`: an event too."""
        unknown = fields.keys() - Progress.model_fields.keys()
        if unknown:
            raise ValueError(
                f"no such progress: {', '.join(sorted(unknown))}; there is {', '.join(Progress.model_fields)}"
            )
        values = Progress(**fields).model_dump(include=set(fields))
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(keys.job(job_id), mapping={f"progress.{name}": encode(value) for name, value in values.items()})
            if announce:
                add_event(pipe, job_id, "progress", values)
            else:
                notice(pipe, job_id)
            await pipe.execute()

    async def first_inputs(self, job_id: str, found: Mapping[str, str]) -> dict[str, str]:
        """The fingerprints of the job's inputs when it began (flowfleet/job/fingerprints.py): `found`, where they were
        not stored before."""
        await self._redis.hsetnx(keys.job(job_id), _INPUTS, encode(dict(found)))
        known: dict[str, str] = json.loads(await self._redis.hget(keys.job(job_id), _INPUTS) or "{}")
        return known

    async def set_data_bytes(self, job_id: str, size: int) -> None:
        """Size of a job's prompts, where its submit did not read them all."""
        await self._redis.hset(keys.job(job_id), DATA_BYTES, size)

    async def set_results(self, job_id: str, results: dict[str, Any]) -> None:
        """Name → path or figure; replaces what was there."""
        await self._redis.hset(keys.job(job_id), "results", encode(results))


def _first_fields(spec: JobSpec, owner: str, now: float) -> dict[str, str]:
    state = {"name": spec.name, "status": JobStatus.QUEUED, "desired": Desired.RUNNING, "reason": ""}
    state |= {"priority": spec.priority}
    progress = {"progress.steps": encode(spec.schedule.steps), "owner": owner, "brief": encode(brief_of(spec))}
    written = {"format": str(FORMAT), "warnings": encode(spec.warnings), "spec": spec.model_dump_json()}
    return {**state, **progress, **written, "created_at": repr(now)}


def _status_fields(status: JobStatus, reason: str, first_run: bool, now: float) -> dict[str, str]:
    fields = {"status": str(status), "reason": reason}
    if status == JobStatus.RUNNING and first_run:
        fields["started_at"] = repr(now)
    if status.terminal:
        fields["ended_at"] = repr(now)
    return fields


def check_steps(status: JobStatus, desired: Desired, done: int, steps: int, before: bytes | None) -> None:
    """Raises Conflict for a number of training steps that the job can no longer have. What is asked again is none."""
    if status.terminal:
        if steps == 0 and before == b"0" and status is JobStatus.SUCCEEDED:
            return
        raise Conflict(f"the job has ended as {status}: continue it as a new job with `flowfleet submit --from ID`")
    if desired == Desired.CANCELLED:
        raise Conflict("the job is being cancelled: continue it as a new job with `flowfleet submit --from ID`")
    if steps == 0 and done == 0:
        raise Conflict("the job has not trained a step yet, so there is no model to keep: cancel it")
    if 0 < steps <= done:
        raise Conflict(f"the job has done {done} steps: ask for more, or finish it")


async def _submitted(redis: Pipe, key: str, spec: JobSpec) -> str | None:
    found = await redis.get(key)
    if found is None:
        return None
    earlier = json.loads(found)
    stored, written = await redis.hmget(keys.job(earlier["job"]), "spec", "format")
    if stored is None:
        raise Conflict(
            f"this Idempotency-Key was used for job {earlier['job']}, which was deleted: use a new key to run it again"
        )
    is_same = earlier["digest"] == spec_digest(spec)
    if not is_same and not is_upgraded(spec, json.loads(stored), format_of(written and written.decode())):
        raise Conflict(f"this Idempotency-Key was used for another job, {earlier['job']}: give each job its own")
    return str(earlier["job"])


def _present(job_id: str, value: bytes | None) -> str:
    if value is None:
        raise NotFound(f"no job {job_id}")
    return value.decode()
