"""Export: write the trained model."""

from flowfleet.proto import trainer_pb2
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev
from services.controller.job.reporting.card import training_card


async def export(job: JobContext) -> None:
    """Write the trained model as files that diffusers loads."""
    card, directory = await training_card(job), str(job.directory / "model")
    request = trainer_pb2.ExportModelRequest(job_id=job.job_id, directory=directory, card=card)
    await job.trainer.stub().ExportModel(request, timeout=job.spec.timeouts.checkpoint_s)
    await job.emit(ev.Exported())
