"""The servicer around scorers of the test, in this process, over real gRPC."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import grpc
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry

from flowfleet.proto.reward_pb2 import RewardSample, ScoreRequest
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.rpc import endpoint as rpc
from services.reward.execution.batcher import Limits
from services.reward.execution.engines import Batched
from services.reward.execution.evaluator import Evaluator
from services.reward.metrics import RewardMetrics
from services.reward.scorer import Outcome, Sample, Score, Scorer
from services.reward.server import RewardServicer
from tests.services.reward.pictures import sample
from tests.waiting import until

if TYPE_CHECKING:
    from flowfleet.proto.reward_pb2_grpc import RewardServiceAsyncStub

Queued = Callable[[], float | None]
Scenario = Callable[["RewardServiceAsyncStub", Queued], Awaitable[None]]


class Echo(Scorer[None]):
    """Scores the number that the prompt is; waits for `gate`; keeps the prompts it saw."""

    name, version, score_range = "echo", "7", (-math.inf, math.inf)

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def parse(self, params: Mapping[str, str]) -> None:
        return None

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        self.seen += [sample.prompt for sample in samples]
        assert self.gate.wait(10)
        return [Score(float(sample.prompt)) for sample in samples]


def numbers(*prompts: str) -> list[RewardSample]:
    return [sample(prompt, Image.new("RGB", (4, 4)), prompt) for prompt in prompts]


async def serve(scorer: Echo, limits: Limits, scenario: Scenario) -> CollectorRegistry:
    """Runs a scenario against a served scorer; returns its metrics."""
    registry = CollectorRegistry()

    def queued() -> float | None:
        return registry.get_sample_value("flowfleet_reward_queued_samples", {"scorer": scorer.name})

    metrics = RewardMetrics(scorer.name, scorer.score_range, registry)
    servicer = RewardServicer(Batched(scorer, Evaluator(scorer, 1), limits, metrics), limits, metrics)
    await servicer.start()
    server = rpc.make_server()
    servicer.add_to_server(server)
    port = rpc.listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with asyncio.timeout(20), rpc.open_channel(f"127.0.0.1:{port}") as channel:
            await scenario(RewardServiceStub(channel), queued)
    finally:
        scorer.gate.set()
        await servicer.drain()
        await server.stop(1)
    return registry


async def test_non_finite_scores_never_leave() -> None:
    async def scenario(stub: RewardServiceAsyncStub, queued: Queued) -> None:
        response = await stub.Score(ScoreRequest(samples=numbers("0.5", "nan", "-inf", "2")), timeout=10)
        assert [given.WhichOneof("outcome") for given in response.scores] == ["score", "error", "error", "score"]
        assert response.scores[1].error == "the score is nan"

    registry = await serve(Echo(), Limits(), scenario)
    labels = {"scorer": "echo", "reason": "non_finite"}
    assert registry.get_sample_value("flowfleet_reward_errors_total", labels) == 2


async def test_a_cancelled_call_is_never_scored() -> None:
    scorer = Echo()

    async def scenario(stub: RewardServiceAsyncStub, queued: Queued) -> None:
        scorer.gate.clear()
        running = asyncio.create_task(_score(stub, "1"))
        await until(lambda: scorer.seen)
        gone, stays = (asyncio.create_task(_score(stub, prompt)) for prompt in ("2", "3"))
        await until(lambda: queued() == 2)
        gone.cancel()
        await until(lambda: queued() == 1)
        scorer.gate.set()
        assert [await running, await stays] == [[1.0], [3.0]]

    registry = await serve(scorer, Limits(), scenario)
    assert scorer.seen == ["1", "3"]
    labels = {"scorer": "echo", "code": "CANCELLED"}
    assert registry.get_sample_value("flowfleet_reward_requests_total", labels) == 1


async def test_a_call_past_its_deadline_is_never_scored() -> None:
    scorer = Echo()

    async def scenario(stub: RewardServiceAsyncStub, queued: Queued) -> None:
        scorer.gate.clear()
        running = asyncio.create_task(_score(stub, "1"))
        await until(lambda: scorer.seen)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(ScoreRequest(samples=numbers("2")), timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: queued() == 0)
        scorer.gate.set()
        assert await running == [1.0]

    await serve(scorer, Limits(), scenario)
    assert scorer.seen == ["1"]


async def test_too_much_at_a_time_is_resource_exhausted() -> None:
    scorer = Echo()

    async def scenario(stub: RewardServiceAsyncStub, queued: Queued) -> None:
        scorer.gate.clear()
        running = asyncio.create_task(_score(stub, "1"))
        await until(lambda: scorer.seen)
        waiting = asyncio.create_task(_score(stub, "2", "3"))
        await until(lambda: queued() == 2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _score(stub, "4")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the limit is 2" in (caught.value.details() or "")
        scorer.gate.set()
        assert [await running, await waiting] == [[1.0], [2.0, 3.0]]

    await serve(scorer, Limits(max_queued=2), scenario)


async def test_a_broken_scorer_is_unavailable_and_keeps_its_secrets() -> None:
    scorer = Echo()

    async def scenario(stub: RewardServiceAsyncStub, queued: Queued) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _score(stub, "secret", "hidden")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == (
            "scorer echo failed on all 2 samples; its log has the reason. The first: "
            "scorer echo failed on this sample: ValueError"
        )
        assert await _score(stub, "1") == [1.0]

    await serve(scorer, Limits(), scenario)


async def _score(stub: RewardServiceAsyncStub, *prompts: str) -> list[float]:
    response = await stub.Score(ScoreRequest(samples=numbers(*prompts)), timeout=10)
    return [given.score for given in response.scores]
