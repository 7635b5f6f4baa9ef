"""Checkpoint: save the trainer."""

from flowfleet.proto import trainer_pb2
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev
from services.controller.job.reporting.card import training_card


async def checkpoint(job: JobContext, version: int) -> None:
    """Save the trainer, and release the blobs of steps that all of the newest checkpoints cover."""
    card, best = await training_card(job), await job.reports.best_before(version)
    request = trainer_pb2.SaveCheckpointRequest(job_id=job.job_id, card=card, keep=best)
    saved = await job.trainer.stub().SaveCheckpoint(request, timeout=job.spec.timeouts.checkpoint_s)
    await job.reports.checkpointed(saved.applied_steps, saved.path, best)
    await job.emit(ev.Checkpointed(version=saved.applied_steps))
    newest = (await job.store.history.checkpoints(job.job_id))[-job.spec.schedule.keep_last :]
    await job.refs.release_before(min(checkpoint.step for checkpoint in newest))
