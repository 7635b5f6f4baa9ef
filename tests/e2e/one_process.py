"""A whole stack in this process: the services' own servers on one event loop, with real gRPC, REST and Redis.

What starts, forks and kills processes is left out, and so are secrets and users of Redis. A job's trainer is a server
that lives as long as the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import uuid
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from redis.asyncio import Redis

from flowfleet.data.blobs import open_blobs_sync
from flowfleet.job.spec import JobSpec
from flowfleet.local.stack import Stack
from flowfleet.peers import Peers
from flowfleet.process.service import STATE_DIR
from flowfleet.process.telemetry import JobMetrics
from flowfleet.proto import trainer_pb2_grpc
from flowfleet.redis.client import connect, connect_sync
from flowfleet.rpc import endpoint as rpc
from services.controller.api.server import Server
from services.controller.app import create_app
from services.controller.fleet.directory import Directory
from services.controller.jobs.scheduler import JobScheduler
from services.controller.platforms.launcher import Launcher
from services.controller.settings import ControllerSettings
from services.controller.store.store import Store
from services.reward import scorers
from services.reward.execution.batcher import Limits
from services.reward.execution.engines import Batched
from services.reward.execution.evaluator import Evaluator
from services.reward.metrics import RewardMetrics
from services.reward.scorer import Scorer
from services.reward.server import RewardServicer
from services.rollout import replica as rollout_replica
from services.rollout.__main__ import parser as rollout_parser
from services.rollout.metrics import RolloutMetrics
from services.rollout.process import make_engine
from services.rollout.replica import Replica
from services.trainer.parallel.ranks import Ranks
from services.trainer.publishing.publisher import Publisher
from services.trainer.runner import Runner
from services.trainer.server import TrainerService
from services.trainer.worker import Worker
from tests.services.controller.places import Places

HOST = "127.0.0.1"
START_S = 60.0

Reward = tuple[str, dict[str, Any]]
"""Name of a scorer, and its settings."""


@contextmanager
def stack_in_one_process(
    redis_url: str,
    state_dir: Path,
    rewards: dict[str, Reward],
    data_roots: Sequence[Path],
    *,
    engine: str = "diffusers",
) -> Iterator[Stack]:
    """Serves until the block ends. One rollout, one trainer of one rank at a time."""
    served, stop = Future[str](), threading.Event()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            addresses = {name: await stack.enter_async_context(_reward(*made)) for name, made in rewards.items()}
            await stack.enter_async_context(_rollout(redis_url, engine))
            settings = ControllerSettings(
                redis_url=SecretStr(redis_url),
                state_dir=state_dir,
                data_roots=tuple(data_roots),
                rewards=addresses,
                port=0,
            )
            served.set_result(await stack.enter_async_context(_controller(settings)))
            await asyncio.to_thread(stop.wait)

    with _environment(redis_url, state_dir), ThreadPoolExecutor(1, "stack") as thread:
        running = thread.submit(asyncio.run, serve())
        running.add_done_callback(lambda done: None if served.done() else served.set_exception(_why(done)))
        try:
            yield Stack(
                url=served.result(START_S),
                redis_url=redis_url,
                state_dir=str(state_dir),
                supervisor=os.getpid(),
                processes={},
            )
        finally:
            stop.set()
            running.result()


def _why(done: Future[None]) -> BaseException:
    return done.exception() or RuntimeError("the stack ended while starting")


@contextmanager
def _environment(redis_url: str, state_dir: Path) -> Iterator[None]:
    """What services read from their environment, and what trainers set for their whole process."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWFLEET_REDIS_URL", redis_url)
        patch.setenv(STATE_DIR, str(state_dir.resolve()))
        patch.setattr(rollout_replica, "RolloutMetrics", partial(RolloutMetrics, CollectorRegistry()))
        yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)


@asynccontextmanager
async def _reward(scorer_name: str, settings: dict[str, Any]) -> AsyncIterator[str]:
    scorer = scorers.make(scorer_name, settings, 1)
    assert isinstance(scorer, Scorer)
    metrics, limits = RewardMetrics(scorer.name, scorer.score_range, CollectorRegistry()), Limits()
    servicer = RewardServicer(Batched(scorer, Evaluator(scorer, 1), limits, metrics), limits, metrics)
    await servicer.start()
    server = rpc.make_server()
    servicer.add_to_server(server)
    async with _served(server) as address:
        yield address
        await servicer.drain()


@asynccontextmanager
async def _rollout(redis_url: str, engine_name: str) -> AsyncIterator[None]:
    engine = make_engine(rollout_parser().parse_args(["--engine", engine_name, "--device", "cpu", "--threads", "1"]))
    client, server, health = connect(redis_url), rpc.make_server(), rpc.HealthState("flowfleet.v1.RolloutService")
    with ThreadPoolExecutor(1, "media") as pool:
        place: dict[str, Any] = {"replica_id": "rollout-0", "on_replaced": _never}
        replica = Replica(engine, client, pool, server, health, Peers(client), **place)
        await health.register(server)
        async with _served(server) as address:
            await replica.join(address, "", "default")
            await health.set_serving(True)
            yield
            await replica.leave(0.0)
    await engine.close()
    await client.aclose()


class _Server(Server):
    """Leaves signals to pytest: they can be handled on the main thread alone."""

    capture_signals = contextlib.nullcontext  # type: ignore[assignment]


@asynccontextmanager
async def _controller(settings: ControllerSettings) -> AsyncIterator[str]:
    def scheduler(
        settings: ControllerSettings,
        redis: Redis,
        store: Store,
        registry: CollectorRegistry,
        launcher: Launcher,
        directory: Directory,
    ) -> JobScheduler:
        return JobScheduler(settings, redis, store, registry, Trainers(), directory)

    server = _Server(create_app(settings, scheduler), settings)
    running = asyncio.create_task(server.serve())
    while not server.started:
        assert not running.done(), "the controller did not start"
        await asyncio.sleep(0.01)
    yield f"http://{HOST}:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await running


class Trainers(Places):
    """Launcher of trainers in this process, of one rank each, one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[str, _Trainer] = {}

    async def ensure(self, job_id: str, spec: JobSpec) -> str:
        assert (spec.trainer.world_size, spec.trainer.samples) == (1, "no"), "one rank, which does not sample"
        if not await self.alive(job_id):
            await self.stop(job_id)
            self._running[job_id] = _Trainer()
            await self._running[job_id].start()
        return self._running[job_id].address

    async def alive(self, job_id: str) -> bool:
        return job_id in self._running and not self._running[job_id].failed

    def placed(self, job_id: str) -> bool:
        return True

    async def termination_message(self, job_id: str) -> str:
        return ""

    async def ended(self, job_id: str) -> None:
        return

    async def stop(self, job_id: str, *, at_once: bool = False) -> None:
        if (trainer := self._running.pop(job_id, None)) is not None:
            await trainer.stop()

    async def keep_only(self, job_ids: Collection[str]) -> None:
        for job_id in set(self._running) - set(job_ids):
            await self.stop(job_id)


class _Trainer:
    """The parts of `services.trainer.__main__.lead`, wired alike."""

    def __init__(self) -> None:
        self.failed = False
        self.address = ""
        self._ranks = Ranks()
        self._redis = connect_sync(os.environ["FLOWFLEET_REDIS_URL"])
        worker = Worker(self._ranks, open_blobs_sync(self._redis))
        worker.loop = asyncio.get_running_loop()
        self._runner = Runner(worker, self._fail)
        self._publisher = Publisher(worker, self._runner, HOST)
        metrics = JobMetrics(CollectorRegistry())
        self._service = TrainerService(worker, self._runner, self._publisher, metrics, uuid.uuid4().hex)
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        server = rpc.make_server()
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(self._service, server)
        self.address = await self._stack.enter_async_context(_served(server))

    async def stop(self) -> None:
        await self._stack.aclose()
        self._publisher.close()
        assert await self._runner.settled(START_S)
        await self._runner.stop()
        self._ranks.close()
        self._redis.close()

    def _fail(self) -> None:
        self.failed = True


@asynccontextmanager
async def _served(server: Any) -> AsyncIterator[str]:
    port = rpc.listen(server, HOST, 0)
    await server.start()
    yield f"{HOST}:{port}"
    await server.stop(1.0)


def _never() -> None:
    raise AssertionError("another process has taken the rollout's place")
