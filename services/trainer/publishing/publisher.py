"""Publisher on rank 0: gives the current weights to replicas. One replica's failure does not stop the others.

The request names the kind of weights. Weights that sample are the trained ones, or the old policy's if the loss keeps
one. Evaluated weights are the average if the job has one. See `Policies.weights`.

Full weights go through `broadcast.py`, and so does an adapter if every replica has an accelerator of the trainer's kind
to itself. Otherwise, or if the broadcast reached no replica, each replica pulls the adapter as a blob, so that replicas
are independent. A replica that already serves exactly these weights (job, version, kind, digest) is left alone.
Replicas that are shared with other jobs fetch the adapter into a slot. The trainer's own ranks, where they sample, take
the adapter in process.
"""

import asyncio
import logging
import time
from typing import Any

from flowfleet.data.replicas import rank_id
from flowfleet.errors import Conflict
from flowfleet.proto import rollout_pb2
from flowfleet.proto.trainer_pb2 import PublishResult, PublishWeightsRequest, PublishWeightsResponse
from services.trainer.commands import Command, Kind
from services.trainer.model.engine import lora_spec, model_spec, shared_threads
from services.trainer.publishing.broadcast import Broadcaster
from services.trainer.publishing.replicas import ReplicaClient, failures, messages
from services.trainer.runner import Runner
from services.trainer.worker import Job, Published, Worker

_SHARE_OF_DEADLINE = 0.95
"""Share of the caller's time that is used; the rest is for the answer."""

log = logging.getLogger(__name__)


class Publisher:
    """`host` is where the replicas reach this process."""

    def __init__(self, worker: Worker, runner: Runner, host: str) -> None:
        self._worker = worker
        self._runner = runner
        self._broadcaster = Broadcaster(worker, runner, host)

    async def publish(self, request: PublishWeightsRequest, timeout_s: float) -> PublishWeightsResponse:
        """Raises Conflict when the trainer holds another version than the one named."""
        start = time.monotonic()
        job = self._worker.job
        assert job is not None, "the service checked"
        deadline, attempt = start + _SHARE_OF_DEADLINE * timeout_s, job.checkpoints.fence.attempt
        model = job.inputs.get("model.path", "")
        threads = shared_threads(job.spec, self._worker.ranks)
        clients = [ReplicaClient(replica, deadline, attempt, model, threads) for replica in request.replicas]
        failed = messages(await failures(clients, lambda client: client.status()))
        ours, others = _own(job, [client for client in clients if client.replica_id not in failed])
        by_blob = job.engine.is_lora and (request.shared or self._broadcaster.backend(others) == "gloo")
        shared: Published | None = None
        published: Published | None = None
        adapter: rollout_pb2.Adapter | None = None
        try:
            async with self._runner.turn():
                if request.version != job.record.version:
                    raise Conflict(
                        f"version {request.version} cannot be published: this trainer holds version "
                        f"{job.record.version}"
                    )
                if ours:
                    shared = await self._runner.call(Command(Kind.SHARE_ADAPTER, request))
                if ours and not others:
                    by_blob = False
                elif by_blob:
                    published = await self._runner.call(Command(Kind.GATHER_ADAPTER, request))
                else:  # No other command in between: the weights must stay the version's
                    published = await self._broadcaster.publish(job, request, others, failed)
                    if job.engine.is_lora and others and all(client.replica_id in failed for client in others):
                        log.warning(
                            "no replica got the adapter by broadcast; sending a blob", extra={"job": job.job_id}
                        )
                        by_blob, others = True, await _answering(others, failed)
                        published = await self._runner.call(Command(Kind.GATHER_ADAPTER, request))
                if ours:  # Inside the turn: what is shared must stay the version's until they have it
                    failed |= await self._give_adapter(job, ours, shared, shared=rollout_pb2.Shared())
            if by_blob:
                assert published is not None, "rank 0 has it"
                if request.shared:
                    adapter = _adapter(job, published, model, threads)
                    failed |= await _pulled(job, others, published, adapter)
                else:
                    failed |= await self._give_adapter(job, others, published, adapter=published.adapter)
        finally:
            await asyncio.gather(*(client.close() for client in clients))
        return _response(request, job, published or shared, failed, clients, time.monotonic() - start, adapter)

    def close(self) -> None:
        """Leaves the transfer group."""
        self._broadcaster.close()

    async def _give_adapter(
        self, job: Job, clients: list[ReplicaClient], published: Published | None, **source: Any
    ) -> dict[str, str]:
        assert published is not None, "rank 0 has it"
        update = rollout_pb2.UpdateWeightsRequest(
            job_id=job.job_id, version=published.version, evaluated=published.evaluated, **source
        )

        async def give(client: ReplicaClient) -> None:
            if client.serves(job.job_id, published):
                return
            await client.init(job.job_id, job.spec)
            await client.start(job.job_id, published.version, evaluated=published.evaluated)
            await client.update(update)
            await client.finish(job.job_id, published)

        return messages(await failures(clients, give))


def _adapter(job: Job, published: Published, fingerprint: str, threads: int) -> rollout_pb2.Adapter:
    """Where any replica gets what was published."""
    return rollout_pb2.Adapter(
        model=model_spec(job.spec, fingerprint, threads),
        lora=lora_spec(job.spec),
        blob=published.adapter,
        attempt=job.checkpoints.fence.attempt,
    )


async def _pulled(
    job: Job, clients: list[ReplicaClient], published: Published, adapter: rollout_pb2.Adapter
) -> dict[str, str]:
    """Has replicas fetch the adapter before they are asked for samples; returns what failed."""
    request = rollout_pb2.PullAdapterRequest(
        job_id=job.job_id,
        version=published.version,
        evaluated=published.evaluated,
        weights_digest=published.digest,
        adapter=adapter,
    )
    return messages(await failures(clients, lambda client: client.pull(request)))


def _own(job: Job, clients: list[ReplicaClient]) -> tuple[list[ReplicaClient], list[ReplicaClient]]:
    """Splits the clients into the trainer's own ranks and the other replicas."""
    ids = {rank_id(job.job_id, rank) for rank in range(job.spec.trainer.world_size)}
    return [c for c in clients if c.replica_id in ids], [c for c in clients if c.replica_id not in ids]


async def _answering(clients: list[ReplicaClient], failed: dict[str, str]) -> list[ReplicaClient]:
    """Replicas that still answer; their failures are removed from `failed`."""
    silent = await failures(clients, lambda client: client.status())
    answering = [client for client in clients if client.replica_id not in silent]
    for client in answering:
        del failed[client.replica_id]
    return answering


def _response(
    request: PublishWeightsRequest,
    job: Job,
    published: Published | None,
    failed: dict[str, str],
    clients: list[ReplicaClient],
    seconds: float,
    adapter: rollout_pb2.Adapter | None,
) -> PublishWeightsResponse:
    results = [
        PublishResult(replica_id=name, ok=name not in failed, error=failed.get(name, ""))
        for name in (replica.replica_id for replica in request.replicas)
    ]
    num_ok = len(results) - len(failed)
    log.info(
        "published version %d%s to %d of %d replicas in %.2f s",
        request.version,
        ", evaluated weights," if request.evaluated else "",
        num_ok,
        len(results),
        seconds,
        extra={"job": job.job_id},
    )
    for name, reason in failed.items():
        log.warning(
            "replica %s did not receive version %d: %s", name, request.version, reason, extra={"job": job.job_id}
        )
    return PublishWeightsResponse(
        version=request.version,
        weights_digest=published.digest if published else "",
        results=results,
        bytes=published.bytes if published else 0,
        seconds=seconds,
        drain_seconds=max((client.drain_s for client in clients), default=0.0),
        update_seconds=update_seconds(clients),
        adapter=adapter,
    )


def update_seconds(clients: list[ReplicaClient]) -> float:
    """Seconds from the last replica's pause to the last verified version, among replicas that verified it."""
    done = [(c.paused_at, c.verified_at) for c in clients if c.paused_at is not None and c.verified_at is not None]
    return max(verified for _, verified in done) - max(paused for paused, _ in done) if done else 0.0
