"""REST: sweeps, of which all jobs are checked before the first is queued."""

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request

from flowfleet.api.jobs import SweepPart
from flowfleet.errors import Conflict
from flowfleet.job.spec import JobSpec
from flowfleet.job.sweeps import digest, label, plan_sweep, told
from services.controller.api.body import read_object
from services.controller.api.dependencies import Services, Use, Who
from services.controller.api.routes.jobs import admit
from services.controller.jobs.submission.problems import InvalidJob
from services.controller.store.records import JobRecord

router = APIRouter(prefix="/v1/sweeps", tags=["jobs"])
NOTHING = "no job of the sweep was queued"


@router.post("", status_code=202)
async def submit_sweep(request: Request, use: Use, who: Who) -> list[JobRecord]:
    """Queues a job for each element of `settings`; none where one cannot run. Asked again, it queues those that it has
    not queued yet."""
    data = await read_object(request)
    try:
        jobs = await asyncio.to_thread(plan_sweep, data)
    except ValueError as error:
        raise InvalidJob(str(error).split("\n"), NOTHING) from None
    records, create = [], use.store.jobs.create
    for (part, spec), (pinned, size) in zip(jobs, await _checked(jobs, use), strict=True):
        record, _ = await create(pinned, _key(part), asked=spec, owner=who.name, data_bytes=size, sweep=part)
        records.append(record)
    await use.runner.notify()
    return records


async def _checked(jobs: Sequence[tuple[SweepPart, JobSpec]], use: Services) -> list[tuple[JobSpec, int]]:
    """Returns what `admit` does; of jobs that are queued already, their specs. Raises InvalidJob, which names settings
    of jobs that cannot run, and Conflict where the name belongs to another sweep."""
    others, free = await use.store.jobs.unended(), asyncio.Semaphore(16)  # each may wait for its rewards
    problems, taken = dict[str, Sequence[str]](), list[str]()

    async def check(part: SweepPart, spec: JobSpec) -> tuple[JobSpec, int]:
        async with free:
            try:
                if (earlier := await use.store.jobs.find_submitted(spec, _key(part))) is not None:
                    if earlier.sweep != part:
                        raise Conflict("it has another at_once")
                    return spec, 0
            except Conflict as error:
                taken.append(str(error))  # told last: it may be the same job before its client uploads its data
            try:
                return await admit(spec, use, others)
            except InvalidJob as error:
                problems[label(part.settings)] = error.problems
                return spec, 0

    found = await asyncio.gather(*(check(*job) for job in jobs))
    if problems:
        raise InvalidJob(told(problems), NOTHING)
    if taken:
        raise Conflict(f"{NOTHING}, because {jobs[0][0].name} is another one: give another name ({taken[0]})")
    return found


def _key(part: SweepPart) -> str:
    return f"sweep {part.name} {digest(part.settings)}"
