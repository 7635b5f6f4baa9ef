"""Position of a job's ledger, sent to its trainer so that both continue one history (flowfleet/data/lineage.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowfleet.data.lineage import follow
from flowfleet.proto import trainer_pb2

if TYPE_CHECKING:
    from services.controller.job.context import JobContext


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
