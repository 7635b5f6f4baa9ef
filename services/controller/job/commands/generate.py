"""Generate: sample what groups lack."""

import asyncio
from collections.abc import Sequence

from services.controller.job import requests
from services.controller.job.commands.drawing import draw
from services.controller.job.commands.previews import Previews
from services.controller.job.context import JobContext

INTAKE_DEADLINE_S = 30.0


async def generate(job: JobContext, previews: Previews, step: int, groups: Sequence[int]) -> None:
    """Sample what these groups lack, on one replica that serves an admissible version, once previews have chosen it
    where the job has them. Given preferences are only encoded."""
    await previews.choose(step, groups)
    wanted = {group: job.machine.wanted(step, group) for group in groups}
    tries = {group: job.machine.tries(step, group) for group in groups}
    request, prompts = requests.generate(job, step, wanted), job.prompts(step)
    if not request.groups:
        return
    request.profile = 0 in groups and step < await job.store.jobs.profiled_before(job.job_id)
    # samples arrive through the Redis stream as well: see JobDriver
    oldest = max(0, step - job.spec.schedule.max_staleness)
    await draw(job, request, [prompts[group.group] for group in request.groups], oldest, step)
    async with asyncio.timeout(INTAKE_DEADLINE_S):
        await job.until(lambda: not any(asked & job.machine.tries(step, g) for g, asked in tries.items()))
