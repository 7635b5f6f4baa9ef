"""A replica's end of weight updates without a model, as a process that can fail on demand.

`python -m tests.services.trainer.replica --port-file P --fault none|die|hang|corrupt`. It keeps what it receives in a
dict and goes through the project's own group, buckets and verification. `die` ends the process, and `hang` stops it,
in the middle of the first broadcast; `corrupt` swaps two elements of what came.
"""

import argparse
import asyncio
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from flowfleet.data.blobs import open_blobs_sync
from flowfleet.errors import DataLoss
from flowfleet.proto import rollout_pb2, rollout_pb2_grpc
from flowfleet.redis import client as redis_client
from flowfleet.rpc import endpoint as rpc
from flowfleet.weights import weights
from flowfleet.weights.transfer import GroupBroken, TransferMember
from services.rollout.weights.state import Attempts


class Replica(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(self, fault: str) -> None:
        self._fault = fault
        self._blobs = open_blobs_sync(redis_client.connect_sync(redis_client.redis_url()))
        self._attempts = Attempts()
        self._member: TransferMember | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._status = rollout_pb2.RolloutStatus(incarnation=uuid.uuid4().hex, state=rollout_pb2.ROLLOUT_STATE_IDLE)
        self.groups: list[str] = []

    async def GetStatus(self, request: Any, context: Any) -> rollout_pb2.RolloutStatus:
        return self._status

    async def InitWeightTransfer(self, request: Any, context: Any) -> rollout_pb2.InitWeightTransferResponse:
        self._attempts.admit(request.job_id, request.attempt)
        self._status.job_id = request.job_id
        if request.HasField("group") and (self._member is None or self._member.group_id != request.group.group_id):
            try:
                self._member = await asyncio.to_thread(TransferMember.join, request.group, torch.device("cpu"))
            except GroupBroken as error:
                raise DataLoss(str(error)) from None
            self._status.samples_total += 1  # groups joined, for the test to see
        return rollout_pb2.InitWeightTransferResponse()

    async def StartWeightUpdate(self, request: Any, context: Any) -> rollout_pb2.StartWeightUpdateResponse:
        self._attempts.admit(request.job_id, request.attempt)
        self._status.state = rollout_pb2.ROLLOUT_STATE_UPDATING
        return rollout_pb2.StartWeightUpdateResponse()

    async def UpdateWeights(self, request: Any, context: Any) -> rollout_pb2.UpdateWeightsResponse:
        self._weights = {}
        if request.WhichOneof("source") == "adapter":
            data = await asyncio.to_thread(self._blobs.get, request.adapter)
            self._weights = load(data)
        else:
            await self._receive(request.broadcast)
        if self._fault == "corrupt":
            flat = next(flat for flat in map(torch.flatten, self._weights.values()) if flat[0] != flat[1])
            flat[:2] = flat[:2].flip(0)
        return rollout_pb2.UpdateWeightsResponse()

    async def FinishWeightUpdate(self, request: Any, context: Any) -> rollout_pb2.FinishWeightUpdateResponse:
        self._status.weights_digest = weights.verify(self._weights, dict(request.hashes))
        self._status.policy_version = request.version
        self._status.state = rollout_pb2.ROLLOUT_STATE_SERVING
        return rollout_pb2.FinishWeightUpdateResponse()

    async def _receive(self, broadcast: rollout_pb2.Broadcast) -> None:
        member = self._member
        if member is None or member.group_id != broadcast.group_id:
            raise DataLoss("not in that group")
        try:
            await asyncio.to_thread(weights.receive, member, broadcast.buckets, self._keep)
        except GroupBroken as error:
            member.close()
            self._member = None
            raise DataLoss(str(error)) from None

    def _keep(self, name: str, value: torch.Tensor) -> None:
        if self._fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        self._weights[name] = value.clone()


async def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--port-file", type=Path, required=True)
    flags.add_argument("--fault", default="none")
    options = flags.parse_args()
    server = rpc.make_server()
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(Replica(options.fault), server)
    health = rpc.HealthState("flowfleet.v1.RolloutService")
    await rpc.serve(server, host="127.0.0.1", port_file=options.port_file, health=health, grace_s=0.1)


if __name__ == "__main__":
    asyncio.run(main())
    sys.exit(0)
