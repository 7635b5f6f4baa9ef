"""The rewards of a job before real gRPC servers that fail on request, with the test's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from flowfleet.job.spec import RewardPart
from flowfleet.proto import reward_pb2, reward_pb2_grpc
from flowfleet.rewards.requests import EncodedSample
from services.controller.platforms.local.directory import StaticDirectory
from services.controller.rewards.job_rewards import JobRewards
from services.controller.rewards.metrics import RewardCalls
from tests.serving import started

PATIENCE_S, PENDING_S = 100.0, 500.0


class Service(reward_pb2_grpc.RewardServiceServicer):
    """Fails by `code` while there is one; else scores 1, or what `answers` makes of the samples."""

    def __init__(self, **described: Any) -> None:
        self.described = {"name": "scripted", "version": "1", **described}
        self.code: grpc.StatusCode | None = None
        self.details = "broken"
        self.version = ""
        self.max_bytes = 1 << 30
        self.params: list[dict[str, str]] = []
        self.sizes: list[int] = []
        self.poison = ""
        """Id of a sample on whose calls it fails."""
        self.gate: asyncio.Event | None = None
        """Calls wait for it."""
        self.answers: Callable[[Any], list[reward_pb2.RewardScore]] = lambda samples: [
            reward_pb2.RewardScore(sample_id=sample.sample_id, score=1.0) for sample in samples
        ]

    async def Describe(self, request: Any, context: Any) -> reward_pb2.DescribeResponse:
        return reward_pb2.DescribeResponse(**self.described)

    async def Score(self, request: Any, context: Any) -> reward_pb2.ScoreResponse:
        self.sizes.append(len(request.samples))
        self.params.append(dict(request.params))
        if self.gate is not None:
            await self.gate.wait()
        if any(sample.sample_id == self.poison for sample in request.samples):
            await context.abort(grpc.StatusCode.INTERNAL, "out of memory")
        if self.code is not None:
            await context.abort(self.code, self.details)
        if request.ByteSize() > self.max_bytes:
            details = f"Received message larger than max ({request.ByteSize()} vs. {self.max_bytes})"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        return reward_pb2.ScoreResponse(scores=self.answers(request.samples), version=self.version)


class Fleet:
    """A job's rewards, their services, and the time."""

    def __init__(self, job_rewards: JobRewards, registry: CollectorRegistry) -> None:
        self.job_rewards, self.registry = job_rewards, registry
        self.now = 1000.0
        self.fetched = 0

    async def score(self, rewards: dict[str, RewardPart], step: int, asked: list[EncodedSample]) -> Any:
        async def fetch() -> list[EncodedSample]:
            self.fetched += 1
            return asked

        return await self.job_rewards.score(rewards, step, {one.sample_id: "" for one in asked}, fetch)

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"flowfleet_controller_reward_{name}_total", labels) or 0.0


@asynccontextmanager
async def served(services: dict[str, Any]) -> AsyncIterator[dict[str, str]]:
    """The addresses of these servicers; a service may also be a function from method to handler."""
    servers, addresses = [], {}
    for name, service in services.items():
        server, addresses[name] = await started(service)
        servers.append(server)
    try:
        async with asyncio.timeout(60):
            yield addresses
    finally:
        await asyncio.gather(*(server.stop(None) for server in servers))


@asynccontextmanager
async def with_services(services: dict[str, Any], addresses: dict[str, str] | None = None) -> AsyncIterator[Fleet]:
    registry = CollectorRegistry()
    async with served(services) as found:
        job_rewards = JobRewards(
            StaticDirectory(found | (addresses or {})),
            20.0,
            calls=RewardCalls(registry),
            patience_s=PATIENCE_S,
            pending_s=PENDING_S,
            clock=lambda: fleet.now,
        )
        fleet = Fleet(job_rewards, registry)
        try:
            yield fleet
        finally:
            await job_rewards.close()


def samples(*names: str, size: int = 1) -> list[EncodedSample]:
    return [EncodedSample(b"x" * size, "", "", sample_id=name) for name in names]
