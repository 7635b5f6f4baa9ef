"""EnsureTrainer: find or start the trainer."""

import grpc

from flowfleet.data.lineage import follow
from flowfleet.proto import trainer_pb2
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev
from services.controller.store.sample_refs import ALL_STEPS
from services.controller.waiting import NotYet


async def ensure_trainer(job: JobContext) -> None:
    """Find or start the trainer; it resumes from its newest checkpoint that goes with the ledger."""
    address = await job.trainer.ensure()
    request = trainer_pb2.ConfigureRequest(
        job_id=job.job_id,
        spec_json=job.spec.model_dump_json(),
        directory=str(job.directory / "checkpoints"),
        ledger=await ledger_position(job),
        inputs=job.fingerprints,
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


async def ledger_position(job: JobContext) -> trainer_pb2.LedgerPosition:
    """The ledger's version, the versions that can go with it, and what is known of their lineage."""
    version, history = job.machine.state.version, dict(job.machine.state.history)
    latest = version
    if (following := await job.refs.request(version)) is not None:
        latest += 1
        if lineage := follow(history, following):
            history[latest] = lineage
    from_start = version == 0 or await job.refs.has_request(0)
    return trainer_pb2.LedgerPosition(version=version, latest=latest, from_start=from_start, history=history)


async def resumed(job: JobContext, configured: trainer_pb2.ConfigureResponse) -> ev.Event:
    """TrainerReady; Rewound where the trainer is behind the ledger, and the requests to catch up with are gone because
    a checkpoint covered them that is lost now."""
    for aside in configured.set_aside:
        data = {"step": aside.step, "path": aside.path, "reason": aside.reason}
        await job.store.events.append(job.job_id, "checkpoint_set_aside", data, once=aside.path)
    version, ledger_version = configured.applied_steps, job.machine.state.version
    if version >= ledger_version:
        return ev.TrainerReady(version=version)
    await job.store.history.forget_checkpoints(job.job_id, above=version)
    if await job.refs.has_request(version):
        return ev.TrainerReady(version=version)
    await job.refs.release_before(ALL_STEPS)
    reason = f"no checkpoint is left that covers steps {version} to {ledger_version - 1}: they are repeated"
    await job.store.events.append(job.job_id, "rewound", {"version": version, "from": ledger_version, "reason": reason})
    return ev.Rewound(version=version, samples=configured.samples)
