"""Validate: sample and score the held-out prompts."""

from functools import partial

from services.controller.job.commands.validation import Validation
from services.controller.job.context import JobContext


async def validate(job: JobContext, validation: Validation, version: int) -> None:
    """Sample the held-out prompts without noise, from the same seeds each time, and score them."""
    validated = await validation.run(version)
    hold = partial(job.store.jobs.hold, job.job_id) if job.machine.pause_reason(validated) else None
    await job.emit(validated, also=hold)
