"""The servicer around scorers of the test, in this process, over real gRPC."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import grpc
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry

from flowfleet.proto.reward_pb2 import RewardSample, ScoreRequest
from services.reward.execution.batcher import Limits
from services.reward.scorer import Outcome, Sample, Score, Scorer
from tests.services.reward.pictures import sample
from tests.services.reward.serving import served
from tests.waiting import until

if TYPE_CHECKING:
    from flowfleet.proto.reward_pb2_grpc import RewardServiceAsyncStub


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


def queued(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("flowfleet_reward_queued_samples", {"scorer": "echo"})


async def test_non_finite_scores_never_leave() -> None:
    async with served(Echo()) as (stub, registry):
        response = await stub.Score(ScoreRequest(samples=numbers("0.5", "nan", "-inf", "2")), timeout=10)
        assert [given.WhichOneof("outcome") for given in response.scores] == ["score", "error", "error", "score"]
        assert response.scores[1].error == "the score is nan"
    labels = {"scorer": "echo", "reason": "non_finite"}
    assert registry.get_sample_value("flowfleet_reward_errors_total", labels) == 2


async def test_a_cancelled_call_is_never_scored() -> None:
    scorer = Echo()
    async with served(scorer) as (stub, registry):
        scorer.gate.clear()
        running = asyncio.create_task(_score(stub, "1"))
        await until(lambda: scorer.seen)
        gone, stays = (asyncio.create_task(_score(stub, prompt)) for prompt in ("2", "3"))
        await until(lambda: queued(registry) == 2)
        gone.cancel()
        await until(lambda: queued(registry) == 1)
        scorer.gate.set()
        assert [await running, await stays] == [[1.0], [3.0]]
    assert scorer.seen == ["1", "3"]
    labels = {"scorer": "echo", "code": "CANCELLED"}
    assert registry.get_sample_value("flowfleet_reward_requests_total", labels) == 1


async def test_a_call_past_its_deadline_is_never_scored() -> None:
    scorer = Echo()
    async with served(scorer) as (stub, registry):
        scorer.gate.clear()
        running = asyncio.create_task(_score(stub, "1"))
        await until(lambda: scorer.seen)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(ScoreRequest(samples=numbers("2")), timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: queued(registry) == 0)
        scorer.gate.set()
        assert await running == [1.0]
    assert scorer.seen == ["1"]


async def test_too_much_at_a_time_is_resource_exhausted() -> None:
    scorer = Echo()
    async with served(scorer, Limits(max_queued=2)) as (stub, registry):
        scorer.gate.clear()
        running = asyncio.create_task(_score(stub, "1"))
        await until(lambda: scorer.seen)
        waiting = asyncio.create_task(_score(stub, "2", "3"))
        await until(lambda: queued(registry) == 2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _score(stub, "4")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the limit is 2" in (caught.value.details() or "")
        scorer.gate.set()
        assert [await running, await waiting] == [[1.0], [2.0, 3.0]]


async def test_a_broken_scorer_is_unavailable_and_keeps_its_secrets() -> None:
    scorer = Echo()
    async with served(scorer) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _score(stub, "secret", "hidden")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == (
            "scorer echo raised ValueError on all 2 samples; the log of scorer echo has more"
        )
        assert await _score(stub, "1") == [1.0]


async def _score(stub: RewardServiceAsyncStub, *prompts: str) -> list[float]:
    response = await stub.Score(ScoreRequest(samples=numbers(*prompts)), timeout=10)
    return [given.score for given in response.scores]
