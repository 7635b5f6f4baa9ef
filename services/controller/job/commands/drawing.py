"""Draws samples with one call to a replica, the same way for every kind of request."""

from __future__ import annotations

from collections.abc import Sequence

from flowfleet.prompts.prompt import Prompt
from flowfleet.proto import common_pb2, rollout_pb2
from services.controller.job.context import JobContext


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
        return sorted([event.sample async for event in call], key=_place)


def _place(sample: common_pb2.Sample) -> tuple[int, int]:
    return sample.id.group, sample.id.index
