"""Handles samples whose blob is gone or is not what was written (evicted, deleted, flipped bits).

A sample's seed derives from its identity, so it is made again: it is wanted once more, and a replica that serves the
same version makes the same bits, which keep the score that they have. A sample that is lost repeatedly is dropped as
`lost`. A restarted trainer may replay a step that was trained already. The version that made its samples is not served
any more, so the replay goes without a lost sample.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial

import grpc

from flowfleet.data.blobs import WORKING_TTL_S
from flowfleet.data.samples import sample_name
from flowfleet.errors import DataLoss, NotFound
from flowfleet.proto import common_pb2, trainer_pb2
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev
from services.controller.job.machine.command import Command, Score, TrainStep
from services.controller.store.sample_refs import TRAINED

log = logging.getLogger(__name__)

CODES = frozenset({grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS})
"""Codes by which a command reports that a blob is missing or broken."""
SCORED = ("media",)


async def make_again(job: JobContext, command: Command, message: str = "") -> bool:
    """Looks for lost blobs of a command that failed, and records whose they were; where all are there, for the sample
    that the trainer's message names, since its blob is not what it should be. False where something else failed."""
    match command:
        case Score(step, group):
            lost = await _lost(job, await job.samples(step, group, "sampled"), SCORED)
            also = partial(job.refs.remove, step, lost)
        case TrainStep(step):
            request = await job.load_train_request(step)
            samples = [item.sample for item in request.samples]
            lost = await _lost(job, samples, TRAINED) or [s for s in samples if message.startswith(_name(s))]
            is_replay = step < job.machine.state.version
            left = _without(request, lost, is_paired=job.spec.loss.needs_pairs)
            also = partial(job.refs.put_request, left) if is_replay else partial(job.refs.remove, step, lost)
        case _:
            return False
    if not lost:
        return False
    names = [f"{sample.id.step}/{sample.id.group}/{sample.id.index}" for sample in lost]
    log.warning("samples lost: %s", ", ".join(names[:10]), extra={"job": job.job_id})
    await job.store.events.append(job.job_id, "lost", {"command": str(command), "samples": names})
    await job.emit(*(ev.Lost(step=s.id.step, group=s.id.group, index=s.id.index) for s in lost), also=also)
    return True


async def _lost(job: JobContext, samples: Sequence[common_pb2.Sample], names: Iterable[str]) -> list[common_pb2.Sample]:
    """Samples that refer to a missing blob; if there are none, those that refer to a broken one."""
    refs = {sample.id.SerializeToString(): [getattr(sample, n) for n in names] for sample in samples}
    named = {ref.uri: ref for found in refs.values() for ref in found if ref.uri}
    gone = {ref.uri for ref in await job.blobs.renew(named.values(), WORKING_TTL_S)}
    if not gone:
        gone = {uri for uri, ref in named.items() if await _is_broken(job, ref)}
    return [s for s in samples if any(ref.uri in gone for ref in refs[s.id.SerializeToString()])]


def _name(sample: common_pb2.Sample) -> str:
    """How the trainer's messages about a sample begin (services/trainer/step/requests.py)."""
    return f"sample {sample_name(sample.id)}: "


async def _is_broken(job: JobContext, ref: common_pb2.BlobRef) -> bool:
    try:
        await job.blobs.get(ref)
    except (DataLoss, NotFound):
        return True
    return False


def _without(
    request: trainer_pb2.TrainStepRequest, lost: Sequence[common_pb2.Sample], *, is_paired: bool
) -> trainer_pb2.TrainStepRequest:
    """The request without some samples, and without the other one of each of their pairs."""
    ids = {(sample.id.group, sample.id.index) for sample in lost}
    gone = [_place(item, is_paired) for item in request.samples if (item.sample.id.group, item.sample.id.index) in ids]
    left = [item for item in request.samples if _place(item, is_paired) not in gone]
    return trainer_pb2.TrainStepRequest(job_id=request.job_id, step=request.step, samples=left)


def _place(item: trainer_pb2.TrainSample, is_paired: bool) -> tuple[int, int]:
    """Returns the key that a sample shares with those that may not stay without it."""
    return item.sample.id.group, item.pair if is_paired else item.sample.id.index
