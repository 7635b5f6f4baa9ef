"""A scorer of a test behind the servicer, in this process, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.rpc import endpoint as rpc
from services.reward.execution.batcher import Limits
from services.reward.execution.engines import Batched, Direct, Engine
from services.reward.execution.evaluator import Evaluator
from services.reward.metrics import RewardMetrics
from services.reward.scorer import AsyncScorer, Scorer
from services.reward.server import RewardServicer
from tests.serving import listening

if TYPE_CHECKING:
    from flowfleet.proto.reward_pb2_grpc import RewardServiceAsyncStub


def servicer_of(scorer: Scorer[Any] | AsyncScorer[Any], limits: Limits, registry: CollectorRegistry) -> RewardServicer:
    metrics = RewardMetrics(scorer.name, scorer.score_range, registry)
    engine: Engine
    if isinstance(scorer, AsyncScorer):
        engine = Direct(scorer, limits, metrics)
    else:
        engine = Batched(scorer, Evaluator(scorer, 1), limits, metrics)
    return RewardServicer(engine, limits, metrics)


@asynccontextmanager
async def served(
    scorer: Scorer[Any] | AsyncScorer[Any], limits: Limits | None = None
) -> AsyncIterator[tuple[RewardServiceAsyncStub, CollectorRegistry]]:
    """A client of the scorer, and its metrics."""
    registry = CollectorRegistry()
    servicer = servicer_of(scorer, limits or Limits(), registry)
    await servicer.start()
    server = rpc.make_server()
    servicer.add_to_server(server)
    try:
        async with (
            asyncio.timeout(120),
            listening(server) as address,
            rpc.open_channel(address) as channel,
        ):
            yield RewardServiceStub(channel), registry
    finally:
        await servicer.drain()
