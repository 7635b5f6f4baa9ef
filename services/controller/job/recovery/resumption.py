"""Consequences of where a trainer resumed: events about lost checkpoints, and steps that must be repeated."""

from __future__ import annotations

from flowfleet.proto import trainer_pb2
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev
from services.controller.store.sample_refs import ALL_STEPS


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
