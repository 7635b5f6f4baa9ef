"""EnsureTrainer: find or start the trainer."""

from __future__ import annotations

import grpc

from flowfleet.proto import trainer_pb2
from services.controller.job.context import JobContext
from services.controller.job.recovery.position import ledger_position
from services.controller.job.recovery.resumption import resumed
from services.controller.waiting import NotYet


async def ensure_trainer(job: JobContext) -> None:
    """Find or start the trainer; it resumes from its newest checkpoint that goes with the ledger."""
    address = await job.trainer.ensure()
    request = trainer_pb2.ConfigureRequest(
        job_id=job.job_id,
        spec_json=job.spec.model_dump_json(),
        directory=str(job.directory / "checkpoints"),
        ledger=await ledger_position(job),
    )
    job.trainer.connect(address)
    try:
        configured = await job.trainer.stub().Configure(request, timeout=job.spec.timeouts.checkpoint_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DATA_LOSS:
            raise
        await job.pause(error.details() or "")
        return
    if configured.misfit:
        await job.trainer.stop()
        raise NotYet(f"the trainer restarts from a checkpoint: {configured.misfit}")
    await job.emit(await resumed(job, configured))
