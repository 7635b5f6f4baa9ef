"""`python -m tests.cluster.scripted_controller FLAGS`: the real controller and the real runner; trainer, rollout and
reward are scripted, in the same process. Two keys in Redis steer them: `REPLICA`, that the rollout is there, and
`GENERATES`, that it answers."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from flowfleet.data.blobs import open_blobs
from flowfleet.proto import reward_pb2_grpc, rollout_pb2_grpc, trainer_pb2_grpc
from services.controller.__main__ import main
from services.controller.fleet.directory import Directory
from services.controller.jobs.scheduler import JobScheduler
from services.controller.platforms.launcher import Launcher
from services.controller.platforms.local.directory import StaticDirectory
from services.controller.settings import ControllerSettings
from services.controller.store.store import Store
from tests.services.controller.scripted import ScriptedLauncher, ScriptedReward, ScriptedRollout, ScriptedTrainer

REPLICA, GENERATES = "test:replica", "test:generates"


class SteeredRollout(ScriptedRollout):
    async def Generate(self, request: Any, context: Any) -> Any:
        while not await self.redis.exists(GENERATES):
            await asyncio.sleep(0.1)
        async for event in super().Generate(request, context):
            yield event

    async def renew(self) -> None:
        while not await self.redis.exists(REPLICA):
            await asyncio.sleep(0.1)
        await super().renew()


class ScriptedRunner(JobScheduler):
    def __init__(
        self,
        settings: ControllerSettings,
        redis: Redis,
        store: Store,
        registry: CollectorRegistry,
        launcher: Launcher,
        directory: Directory,
    ) -> None:
        self._rollout = SteeredRollout(redis, open_blobs(redis, "redis"))
        self._server = grpc.aio.server()
        address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._rollout.address = address
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self._rollout, self._server)
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(ScriptedTrainer(self._rollout), self._server)
        reward_pb2_grpc.add_RewardServiceServicer_to_server(ScriptedReward(lambda _: 0.5), self._server)
        rewards = StaticDirectory(dict.fromkeys(settings.rewards, address))
        super().__init__(settings, redis, store, registry, ScriptedLauncher(address), rewards)

    async def start(self) -> None:
        await self._server.start()
        self._renewing = asyncio.create_task(self._rollout.renew())
        await super().start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], ScriptedRunner))
