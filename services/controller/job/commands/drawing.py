"""Draws samples with one call to a replica, the same way for every kind of request."""

from collections.abc import Sequence

from flowfleet.errors import DataLoss
from flowfleet.job.drop_reasons import DropReason
from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2, rollout_pb2
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev


async def draw(
    job: JobContext, request: rollout_pb2.GenerateRequest, prompts: Sequence[Prompt], oldest: int, newest: int
) -> list[common_pb2.Sample]:
    """Samples a request on one replica that serves a version from `oldest` to `newest`. Returns what it reported, by
    group and index; of training samples the ids. Sets version, digest and condition images. `prompts`: one for each of
    its groups."""
    rows = sum(len(group.indices) for group in request.groups)
    async with job.pool.replica(oldest, newest, rows, evaluated=request.evaluated) as replica:
        request.policy_version, request.weights_digest = replica.version or 0, replica.digest
        await job.inputs.attach(request, prompts)
        call = job.pool.stub(replica).Generate(request, timeout=job.spec.timeouts.generate_s)
        events = [event async for event in call]
    if failed := [event for event in events if event.failure]:
        await _drop(job, request, failed)
    return sorted([event.sample for event in events if not event.failure], key=_place)


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
