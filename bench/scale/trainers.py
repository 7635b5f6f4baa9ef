"""A process of simulated trainers, one a pool, and of the one reward.

python -m bench.scale.trainers LOAD_JSON READY_FILE
"""

import asyncio
from pathlib import Path
from typing import Any

import grpc

from bench.scale.load import Load
from bench.scale.simulation import Notes, listen, run, until_stopped
from flowfleet.proto import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tests.services.controller.scripted import ScriptedReward, ScriptedTrainer

DEADLINE_S = 60.0
METRICS = {f"actor/metric_{number}": float(number) for number in range(30)}
"""About as many as a trainer's step has."""


class Trainer(ScriptedTrainer):
    """Takes its time for a step, and gives replicas each version by the calls of a real publication."""

    def __init__(self, load: Load, notes: Notes) -> None:
        absent: Any = None  # it publishes by calls
        super().__init__(absent)
        self._load, self._notes = load, notes
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._given: dict[str, int] = {}
        """Replica → version that it holds: it is not given that again."""

    async def TrainStep(self, request: Any, context: Any) -> trainer_pb2.TrainStepResponse:
        self._notes.add("train", request.job_id, request.step)
        if request.step == len(self.steps):
            await asyncio.sleep(self._load.duration_s(self._load.train_s, request.job_id, request.step))
        response = await super().TrainStep(request, context)
        response.metrics.update(METRICS)
        return response

    async def PublishWeights(self, request: Any, context: Any) -> trainer_pb2.PublishWeightsResponse:
        results = await asyncio.gather(*(self._give(request, replica) for replica in request.replicas))
        self._notes.add("published", request.job_id, request.version)
        return trainer_pb2.PublishWeightsResponse(version=request.version, results=results, bytes=1)

    async def _give(
        self, request: trainer_pb2.PublishWeightsRequest, replica: trainer_pb2.Replica
    ) -> trainer_pb2.PublishResult:
        if self._given.get(replica.replica_id) == request.version:
            return trainer_pb2.PublishResult(replica_id=replica.replica_id, ok=True)
        if replica.address not in self._channels:
            self._channels[replica.address] = grpc.aio.insecure_channel(
                replica.address, options=[("grpc.enable_http_proxy", 0)]
            )
        stub = rollout_pb2_grpc.RolloutServiceStub(self._channels[replica.address])
        which: dict[str, Any] = {"job_id": request.job_id, "version": request.version}
        try:
            if request.version == 0:
                init = rollout_pb2.InitWeightTransferRequest(job_id=request.job_id)
                await stub.InitWeightTransfer(init, timeout=DEADLINE_S)
            await stub.StartWeightUpdate(rollout_pb2.StartWeightUpdateRequest(**which), timeout=DEADLINE_S)
            await stub.UpdateWeights(rollout_pb2.UpdateWeightsRequest(**which), timeout=DEADLINE_S)
            await stub.FinishWeightUpdate(rollout_pb2.FinishWeightUpdateRequest(**which), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            return trainer_pb2.PublishResult(replica_id=replica.replica_id, error=error.code().name)
        self._given[replica.replica_id] = request.version
        return trainer_pb2.PublishResult(replica_id=replica.replica_id, ok=True)


def score(sample: reward_pb2.RewardSample) -> float:
    """A number that differs inside a group."""
    return int(sample.sample_id.rpartition("/")[2]) / 4


async def serve(load: Load, path: Path) -> None:
    notes = Notes()
    reward = ScriptedReward(score, name="score", version="1")  # type: ignore[abstract]
    add = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    servers = [await listen(add, Trainer(load, notes), load.trainer_address(pool)) for pool in range(load.jobs)]
    servers.append(await listen(reward_pb2_grpc.add_RewardServiceServicer_to_server, reward, load.reward_address))
    await until_stopped(notes, path)


if __name__ == "__main__":
    run(serve)
