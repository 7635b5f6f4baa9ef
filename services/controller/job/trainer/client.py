"""The trainer of one job: its launcher bound to the job, and gRPC to the trainer that was found last."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from flowfleet.job.spec import JobSpec
from flowfleet.proto import trainer_pb2, trainer_pb2_grpc
from flowfleet.rpc.endpoint import open_channel
from flowfleet.rpc.kinds import job_token
from services.controller.platforms.launcher import FencedLauncher, stop_for_good, stopped
from services.controller.rewards.gradients import GradientRewards
from services.controller.waiting import NotYet

END_DEADLINE_S = 2.0


class JobTrainer:
    def __init__(self, launcher: FencedLauncher, job_id: str, spec: JobSpec, rewards: GradientRewards) -> None:
        self._launcher, self._job_id, self._spec = launcher, job_id, spec
        self.rewards = rewards
        """Rewards that the trainer asks itself."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.address = ""
        """The trainer that calls go to; empty before `connect` and after `drop`."""

    def stub(self) -> trainer_pb2_grpc.TrainerServiceAsyncStub:
        """Calls to the trainer. Raises NotYet while there is none."""
        if not self.address:
            raise NotYet("the trainer has not started yet")
        if self.address not in self._channels:
            self._channels[self.address] = open_channel(self.address, token=job_token(self._job_id))
        return trainer_pb2_grpc.TrainerServiceStub(self._channels[self.address])

    async def train(self, request: trainer_pb2.TrainStepRequest) -> trainer_pb2.TrainStepResponse:
        """Applies a step. Raises RewardFailure or RewardPause where the trainer lacks a reward's gradients."""
        limit_s = self._spec.timeouts.train_step_s
        return await self.rewards.trained(request, lambda sent: self.stub().TrainStep(sent, timeout=limit_s))

    def connect(self, address: str) -> None:
        """Sends calls to this trainer from now on."""
        self.address = address

    async def drop(self) -> None:
        """Forgets the trainer. Calls to it that are under way are cancelled."""
        channel = self._channels.pop(self.address, None)
        self.address = ""
        if channel is not None:
            await channel.close(None)

    async def close(self) -> None:
        await asyncio.gather(*(channel.close(None) for channel in self._channels.values()))

    # -- its processes, as `Launcher` has them -------------------------------------------------------------------

    async def ensure(self) -> str:
        return await self._launcher.ensure(self._job_id, self._spec)

    async def alive(self) -> bool:
        return await self._launcher.alive(self._job_id)

    def placed(self) -> bool:
        return self._launcher.placed(self._job_id)

    async def termination_message(self) -> str:
        return await self._launcher.termination_message(self._job_id)

    async def stop(self, *, at_once: bool = False) -> bool:
        return await stopped(self._launcher, self._job_id, at_once=at_once)

    @property
    def is_admitted(self) -> bool:
        return self._job_id in self._launcher.admitted

    async def leave(self) -> None:
        """Ends the trainer and gives its places to other jobs."""
        await stop_for_good(self._launcher, self._job_id)
        await self.drop()

    async def stop_for_good(self) -> None:
        """Has the trainer of an ended job end by itself, with exit code 0, then stops what is left of it."""
        if self.address:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self.stub().End(trainer_pb2.EndTrainerRequest(), timeout=END_DEADLINE_S)
                await self._launcher.ended(self._job_id)
        await stop_for_good(self._launcher, self._job_id)
