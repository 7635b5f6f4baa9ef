"""REST: jobs, submitted, listed, shown, and asked to pause, resume or stop."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import RedirectResponse

from flowfleet.api.jobs import Job, JobStatus, Priority
from flowfleet.api.overview import JobRow
from flowfleet.errors import Conflict, NotFound, Unavailable
from flowfleet.job.spec import JobSpec
from flowfleet.process.traces import StepIds
from services.controller.api.body import read_object
from services.controller.api.dependencies import Cursor, JobId, KnownJobId, KnownStatus, Limit, Page, Services, Use, Who
from services.controller.jobs.submission import checks
from services.controller.store.records import Action, JobRecord

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

IdempotencyKey = Annotated[
    str | None,
    Header(min_length=1, max_length=255, description="The same key with the same job gives the same job, for 7 days."),
]


@router.post("", status_code=202, responses={202: {"headers": {"Location": {"schema": {"type": "string"}}}}})
async def submit(
    request: Request, response: Response, use: Use, who: Who, idempotency_key: IdempotencyKey = None
) -> JobRecord:
    """Queues a job: the job file's settings as JSON."""
    spec = checks.parse(await read_object(request))
    record = await use.store.jobs.find_submitted(spec, idempotency_key) if idempotency_key else None
    if record is None:
        checked, data_bytes = await admit(spec, use, await use.store.jobs.unended())
        record, _ = await use.store.jobs.create(
            checked, idempotency_key, asked=spec, owner=who.name, data_bytes=data_bytes
        )
    await use.runner.notify()
    response.headers["Location"] = f"/v1/jobs/{record.id}"
    return (await _shown([record], use))[0]


async def admit(spec: JobSpec, use: Services, others: Sequence[JobRecord]) -> tuple[JobSpec, int]:
    """Returns what `checks.check` does. Raises as it does, and where the others leave no room for the job."""
    if use.runner.loss:  # whoever brings the lost writes back would lose this job
        raise Unavailable(use.runner.loss)
    await use.memory.check_room()
    room, limits = await use.memory.room() if use.settings.blobs == "redis" else 0, use.settings.limits
    devices, template = use.settings.trainer_devices, use.settings.trainer_template
    checked, data_bytes = await checks.check(spec, use.directory, use.sources, limits, devices, room, template)
    limits.check_room(spec, others, data_bytes)
    return checked, data_bytes


@router.get("")
async def list_jobs(
    use: Use,
    cursor: Cursor = None,
    limit: Limit = 50,
    status: KnownStatus | None = None,
) -> Page[Job]:
    """Newest first, without `spec` and `rewards`."""
    items, following = await use.store.lists.page(cursor, limit, status)
    return Page(items=list[Job](await _shown(items, use)), next_cursor=following)


@router.get("/{job_id}")
async def show_job(job_id: JobId, use: Use) -> JobRecord:
    return (await _shown([await use.store.jobs.get(job_id)], use))[0]


@router.get("/{job_id}/steps/{step}/trace", status_code=307, response_class=RedirectResponse)
async def trace(job_id: KnownJobId, step: Annotated[int, Path(ge=0, le=10_000_000)], use: Use) -> str:
    """Leads to the trace of a training step, in the tool that the operator named."""
    if not use.settings.trace_url:
        raise NotFound("this controller has no address of traces: set FLOWFLEET_TRACE_URL")
    return use.settings.trace_url.replace("{trace_id}", StepIds.of(job_id, step).trace_hex)


@router.delete("/{job_id}", status_code=202)
async def delete(
    job_id: JobId, use: Use, files: Annotated[bool, Query(description="Checkpoints, models and logs go too.")] = False
) -> JobRecord:
    """Removes an ended job and its history, once it is archived where the operator has an archive. Without `files` its
    folder stays. Afterwards the job is 410 while its Idempotency-Key lives, then 404."""
    if files and job_id in await use.store.removal.named_jobs():
        raise Conflict(
            "a job that has not ended starts from this job's files: wait until it has ended, or leave `files` out"
        )
    return await _request(job_id, use, "delete", files=files)


@router.post("/{job_id}/cancel", status_code=202)
async def cancel(job_id: JobId, use: Use) -> JobRecord:
    """Stops the job for good; what it has written stays."""
    return await _request(job_id, use, "cancel")


@router.post("/{job_id}/pause", status_code=202)
async def pause(job_id: JobId, use: Use) -> JobRecord:
    """Lets running commands end and starts nothing else. After `pause.release_s` the job is saved, and its trainer's
    devices go to other jobs."""
    return await _request(job_id, use, "pause")


@router.post("/{job_id}/resume", status_code=202)
async def resume(job_id: JobId, use: Use) -> JobRecord:
    return await _request(job_id, use, "resume")


@router.post("/{job_id}/finish", status_code=202)
async def finish(job_id: JobId, use: Use) -> JobRecord:
    """Ends the job after the steps that are done: it is validated, saved and exported as at its planned end."""
    return await _request_steps(job_id, use, 0)


@router.post("/{job_id}/extend", status_code=202)
async def extend(
    job_id: JobId, use: Use, steps: Annotated[int, Query(ge=1, le=10_000_000, description="Training steps in all.")]
) -> JobRecord:
    """Gives a job that has not ended another number of training steps."""
    checks.check_extension((await use.store.jobs.get(job_id)).job_spec(), steps)
    return await _request_steps(job_id, use, steps)


@router.post("/{job_id}/profile", status_code=202)
async def profile(
    job_id: JobId, use: Use, steps: Annotated[int, Query(ge=1, le=10, description="Training steps, from the next.")] = 1
) -> JobRecord:
    """Has the trainer's ranks profile the updates of the next steps, which takes some time and disk."""
    return await use.store.jobs.request_profile(job_id, steps)


@router.post("/{job_id}/priority", status_code=202)
async def prioritize(job_id: JobId, use: Use, priority: Priority) -> JobRecord:
    """Gives a job another priority, which counts while it waits in the queue."""
    record = await use.store.jobs.prioritize(job_id, priority)
    await use.runner.notify()
    return record


async def _request_steps(job_id: str, use: Use, steps: int) -> JobRecord:
    record = await use.store.jobs.request_steps(job_id, steps)
    await use.runner.notify()
    return record


async def _request(job_id: str, use: Use, action: Action, *, files: bool = False) -> JobRecord:
    record = await use.store.jobs.request(job_id, action, files=files)
    await use.runner.notify()
    return record


async def _shown(records: Sequence[JobRecord], use: Services) -> list[JobRecord]:
    """The jobs as stored, with the places of their traces, except for two reasons that Redis does not hold: it accepts
    no writes, and a job waits behind others of its pool."""
    queued = any(record.status is JobStatus.QUEUED for record in records)
    rows = await use.feed.waiting() if queued else {}
    told = [_with_reason(record, use.runner.trouble, rows.get(record.id)) for record in records]
    if not use.settings.trace_url:
        return told
    return [one.model_copy(update={"trace_url": f"/v1/jobs/{one.id}/steps/{{step}}/trace"}) for one in told]


def _with_reason(record: JobRecord, trouble: str, row: JobRow | None) -> JobRecord:
    if record.status.terminal:
        return record
    if trouble:
        return record.model_copy(update={"reason": f"the job waits: {trouble}"})
    if row is None or row.place is None or record.is_unreadable:
        return record
    return record.model_copy(update={"reason": row.waits, "place": row.place, "starts_in_s": row.starts_in_s})
