"""A process of simulated rollout replicas, each a gRPC server of its own and registered as a real one is.

    python -m bench.scale.replicas LOAD_JSON PROCESS READY_FILE          (FLOWFLEET_REDIS_URL)

A Generate takes its time, then leaves in Redis what a real one leaves: a blob each for trajectory, picture and prompt,
and an entry a sample in the job's stream.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
from redis.asyncio import Redis

from bench.scale.load import Load
from bench.scale.simulation import Notes, listen, run, until_stopped
from flowfleet.data.replicas import RENEW_EVERY_S, ReplicaDirectory, ReplicaRecord
from flowfleet.proto import common_pb2, rollout_pb2, rollout_pb2_grpc
from flowfleet.redis import keys
from flowfleet.redis.client import connect, redis_url

TTL_S = 24 * 3600
MEDIA_BYTES = 4096
START_AT_ONCE = 50
SLICES = 30
"""Renewals of a process are spread over their period."""


class Replica(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, load: Load, index: int, redis: Redis, notes: Notes) -> None:
        self._load, self._redis, self._notes = load, redis, notes
        self._directory = ReplicaDirectory(redis)
        self.index, self.address = index, load.replica_address(index)
        self.replica_id = f"replica-{index}"
        self._state, self._job_id, self._version = "idle", "", 0
        self._picture = os.urandom(MEDIA_BYTES)

    def record(self) -> ReplicaRecord:
        pool = self._load.pool_of(self.index)
        return ReplicaRecord(
            self.replica_id, self.address, "1", "", pool, self._state, self._job_id, self._version, device="cuda"
        )

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateEvent]:
        self._notes.add("generate", request.job_id, request.step)
        if (self._state, self._job_id, self._version) != ("serving", request.job_id, request.policy_version):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this replica does not serve this version")
        groups = [group.group for group in request.groups]
        await asyncio.sleep(self._load.duration_s(self._load.generate_s, request.job_id, request.step, groups))
        for sample in await self._publish(request):
            yield rollout_pb2.GenerateEvent(sample=sample)
        self._notes.add("generated", request.job_id, request.step)

    async def InitWeightTransfer(self, request: rollout_pb2.InitWeightTransferRequest, context: Any) -> Any:
        if request.job_id != self._job_id:
            self._job_id, self._version, self._state = request.job_id, 0, "idle"
        return rollout_pb2.InitWeightTransferResponse()

    async def StartWeightUpdate(self, request: rollout_pb2.StartWeightUpdateRequest, context: Any) -> Any:
        self._state, self._version = "updating", request.version
        await self._directory.put(self.record())
        return rollout_pb2.StartWeightUpdateResponse()

    async def UpdateWeights(self, request: rollout_pb2.UpdateWeightsRequest, context: Any) -> Any:
        await asyncio.sleep(self._load.publish_s)
        return rollout_pb2.UpdateWeightsResponse()

    async def FinishWeightUpdate(self, request: rollout_pb2.FinishWeightUpdateRequest, context: Any) -> Any:
        self._state, self._version = "serving", request.version
        await self._directory.put(self.record())
        return rollout_pb2.FinishWeightUpdateResponse()

    async def GetStatus(self, request: rollout_pb2.GetRolloutStatusRequest, context: Any) -> rollout_pb2.RolloutStatus:
        self._notes.add("status", "", self.index)
        state = rollout_pb2.RolloutState.Value(f"ROLLOUT_STATE_{self._state.upper()}")
        return rollout_pb2.RolloutStatus(
            replica_id=self.replica_id, incarnation="1", state=state, job_id=self._job_id, policy_version=self._version
        )

    async def _publish(self, request: rollout_pb2.GenerateRequest) -> list[common_pb2.Sample]:
        """Writes in one pipeline. A real replica sends each command alone, but the simulation must be cheap."""
        pipe = self._redis.pipeline(transaction=False)

        def put(kind: str, *place: int, data: bytes) -> common_pb2.BlobRef:
            digest = hashlib.sha256(data).hexdigest()
            key = keys.blob(request.job_id, kind, request.step, *place, digest[:16])
            pipe.set(key, data, ex=TTL_S)
            return common_pb2.BlobRef(uri=f"redis:{key}", size_bytes=len(data), sha256=digest)

        samples = []
        for group in request.groups:
            embeds = put("embeds", group.group, data=b"embeds")
            for index, seed in zip(group.indices, group.seeds, strict=True):
                sample = common_pb2.Sample(
                    id=common_pb2.SampleId(job_id=request.job_id, step=request.step, group=group.group, index=index),
                    purpose=request.purpose,
                    seed=seed,
                    policy_version=request.policy_version,
                    trajectory=put("trajectory", group.group, index, data=b"trajectory"),
                    prompt_embeds=embeds,
                    media=put("media", group.group, index, data=self._picture),
                    media_type="image/png",
                    sde_steps=request.noise.recorded_steps,
                    height=request.sampling.height,
                    width=request.sampling.width,
                    replica_id=self.replica_id,
                    num_frames=1,
                )
                pipe.xadd(keys.trajectories(request.job_id), {b"sample": sample.SerializeToString()})
                samples.append(sample)
        await pipe.execute()
        return samples


async def renew(replicas: Sequence[Replica], redis: Redis) -> None:
    """Keeps them registered."""
    directory = ReplicaDirectory(redis)
    while True:
        for part in range(SLICES):
            async with redis.pipeline(transaction=False) as pipe:
                for replica in replicas[part::SLICES]:
                    await directory.put(replica.record(), pipe)
                await pipe.execute()
            await asyncio.sleep(RENEW_EVERY_S / SLICES)


async def serve(load: Load, process: str, path: Path) -> None:
    redis, notes = connect(redis_url()), Notes()
    replicas = [Replica(load, index, redis, notes) for index in range(int(process), load.replicas, load.processes)]  # type: ignore[abstract]
    add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
    servers = []
    for start in range(0, len(replicas), START_AT_ONCE):
        part = replicas[start : start + START_AT_ONCE]
        servers += await asyncio.gather(*(listen(add, replica, replica.address) for replica in part))
    renewing = asyncio.create_task(renew(replicas, redis))
    await until_stopped(notes, path)
    renewing.cancel()


if __name__ == "__main__":
    run(serve)
