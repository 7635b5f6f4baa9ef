"""Draws samples with one call to a replica, the same way for every kind of request."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import grpc
from pydantic import ValidationError

from flowfleet.api.profiles import Profile
from flowfleet.errors import DataLoss
from flowfleet.job.drop_reasons import DropReason
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2, rollout_pb2
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev

log = logging.getLogger(__name__)


async def draw(
    job: JobContext, request: rollout_pb2.GenerateRequest, prompts: Sequence[Prompt], oldest: int, newest: int
) -> list[common_pb2.Sample]:
    """Samples a request on one replica that serves a version from `oldest` to `newest`. Returns what it reported, by
    group and index; of training samples the ids. Sets version, digest and condition images. `prompts`: one for each of
    its groups."""
    rows = sum(len(group.indices) for group in request.groups)
    async with job.pool.replica(oldest, newest, rows, evaluated=request.evaluated) as replica:
        job.pool.address(request, replica)
        await job.inputs.attach(request, prompts)
        call = job.pool.stub(replica).Generate(request, timeout=job.spec.timeouts.generate_s)
        try:
            answers = [event async for event in call]
        except grpc.aio.AioRpcError as error:
            await job.pool.failed(replica, error.details() or "")
            raise
    events = [event for event in answers if not event.HasField("profile")]
    for event in answers:
        if event.HasField("profile"):
            await asyncio.to_thread(_keep, job.directory / "profiles", request.step, event.profile)
    if failed := [event for event in events if event.failure]:
        await _drop(job, request, failed)
    return sorted([event.sample for event in events if not event.failure], key=_place)


def _keep(folder: Path, step: int, profile: rollout_pb2.BatchProfile) -> None:
    """Writes a rollout's profile next to the trainer's (services/trainer/step/profiler.py)."""
    name = f"step-{step:08d}-rollout"
    try:
        table = Profile.model_validate_json(profile.table).model_copy(update={"step": step})
        folder.mkdir(exist_ok=True)
        if profile.trace:
            (folder / f"{name}.trace.json.gz").write_bytes(profile.trace)
        (folder / f"{name}.json").write_text(table.model_dump_json(), encoding="utf-8")
    except (OSError, ValidationError) as error:
        log.warning("profile of the sampling for step %d not kept: %s", step, error)


async def _drop(
    job: JobContext, request: rollout_pb2.GenerateRequest, failed: Sequence[rollout_pb2.GenerateEvent]
) -> None:
    """Drops samples that their replica could not make. Raises DataLoss for held-out ones, which are not dropped."""
    reason = failed[0].failure
    if request.purpose == common_pb2.PURPOSE_VALIDATE:
        raise DataLoss(f"{len(failed)} held-out samples failed: {reason}")
    told = {"command": f"Generate of step {request.step}", "samples": len(failed), "reason": reason}
    await job.store.events.append(job.job_id, "gave_up", told)
    places = (event.sample.id for event in failed)
    await job.emit(
        *(
            ev.Dropped(step=request.step, group=place.group, index=place.index, reason=DropReason.ROLLOUT_FAILED)
            for place in places
        )
    )


def _place(sample: common_pb2.Sample) -> tuple[int, int]:
    return sample.id.group, sample.id.index
