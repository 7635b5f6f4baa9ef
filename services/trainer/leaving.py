"""Saves a trainer that gets a signal to end, as from a drained node or a preemption, within its grace.

An adapter takes seconds to write, so its steps since the last checkpoint are kept. Full weights may take minutes: they
are written where the grace is long, else the log says what is lost. A step that still runs when the grace ends is lost
too: weights inside it are of no version.
"""

from __future__ import annotations

import asyncio
import logging

from flowfleet.errors import FlowfleetError
from flowfleet.proto import trainer_pb2
from services.trainer.commands import Command, Kind
from services.trainer.runner import Runner
from services.trainer.worker import Job

FULL_S = 120.0
"""Shortest grace in which full weights are saved."""

log = logging.getLogger(__name__)


async def leave(job: Job | None, runner: Runner, grace_s: float) -> bool:
    """Waits for the running command, then saves. False if the ranks are still at work when the grace ends."""
    until = asyncio.get_running_loop().time() + grace_s
    settled = await runner.settled(grace_s)
    if job is None or (steps := job.record.version - job.checkpoints.newest) <= 0:
        return settled
    extra = {"job": job.job_id}
    lost = f"steps since checkpoint {job.checkpoints.newest} will be repeated: {steps}"
    if not settled:
        log.warning("a command still runs after %.0f s; %s or more", grace_s, lost, extra=extra)
        return False
    if not job.engine.is_lora and grace_s < FULL_S:
        log.warning("full weights are not saved on a signal; %s", lost, extra=extra)
        return True
    saving = asyncio.create_task(_save(job, runner))
    if not (await asyncio.wait([saving], timeout=until - asyncio.get_running_loop().time()))[0]:
        log.warning("saving takes longer than the grace of %.0f s; %s", grace_s, lost, extra=extra)
        return False
    if error := saving.exception():
        log.warning("could not save: %s; %s", error, lost, extra=extra)
        return isinstance(error, FlowfleetError)
    log.info("saved %s before the end", saving.result().path, extra=extra)
    return True


async def _save(job: Job, runner: Runner) -> trainer_pb2.SaveCheckpointResponse:
    """Keeps all checkpoints: which may go only the controller knows."""
    request = trainer_pb2.SaveCheckpointRequest(job_id=job.job_id, keep=job.checkpoints.steps)
    async with runner.turn():
        saved: trainer_pb2.SaveCheckpointResponse = await runner.call(Command(Kind.SAVE, request))
    return saved
