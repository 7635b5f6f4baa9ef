"""Publish: bring the newest version to every replica."""

import asyncio
import time
from collections.abc import Sequence

from flowfleet.job.fingerprints import CHANGED
from flowfleet.proto import trainer_pb2
from services.controller.fleet.replicas import Replica
from services.controller.job.context import JobContext
from services.controller.job.machine import events as ev
from services.controller.waiting import NotYet


async def publish(job: JobContext, updating: asyncio.Lock, version: int, evaluated: bool) -> None:
    """Give every live replica the new weights; each verifies them before it serves them. Rollouts sample with them
    while the trainer's own ranks still end a batch, and no update comes between the two."""
    spec = job.spec
    pools = job.pool.rollouts_first()
    if not pools:
        raise NotYet(job.pool.nobody_there())
    if spec.trainer.deterministic and spec.loss.traits.has_step_ratio and (split := _split(job.pool.live())):
        await job.pause(split)
        return
    started, responses = time.monotonic(), list[trainer_pb2.PublishWeightsResponse]()

    async def give(replicas: Sequence[Replica]) -> None:
        request = trainer_pb2.PublishWeightsRequest(
            job_id=job.job_id, version=version, evaluated=evaluated, shared=job.pool.pulls
        )
        request.replicas.extend(trainer_pb2.Replica(replica_id=r.replica_id, address=r.address) for r in replicas)
        responses.append(await job.trainer.stub().PublishWeights(request, timeout=spec.timeouts.publish_s))
        job.pool.mark_suspect(result.replica_id for result in responses[-1].results if not result.ok)
        await job.pool.refresh()
        job.reports.published(responses, time.monotonic() - started)

    async def tell() -> None:
        if any(result.ok for result in responses[-1].results):
            digest = responses[-1].weights_digest
            await job.pool.offer(responses[-1], evaluated=evaluated)
            await job.emit(ev.Published(version=version, evaluated=evaluated, digest=digest))

    with job.pool.updating():
        await give(pools[0])
        async with updating:
            if version != job.machine.state.version:
                return
            await tell()
            for ranks in pools[1:]:
                await give(ranks)
                await tell()
    results = [result for response in responses for result in response.results]
    if changed := next((result for result in results if CHANGED in result.error), None):
        await job.pause(f"replica {changed.replica_id}: {changed.error}")
        return
    if not any(result.ok for result in results):
        raise NotYet(f"no replica received version {version}: {results[0].error}")


def _split(replicas: Sequence[Replica]) -> str:
    """Reason to pause a deterministic job, if there is one."""
    for replica in replicas:
        if replica.num_devices > 1:
            return (
                f"trainer.deterministic recomputes the rollout's log-probs bit for bit, but {replica.num_devices} "
                f"devices of replica {replica.replica_id} share each sample, which rounds otherwise: submit the job "
                "with trainer.deterministic = false, or give the pool replicas of one device each and resume the job"
            )
    return ""
