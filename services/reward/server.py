"""The RewardService: checks a request, hands its samples to the engine, and answers with one outcome a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowfleet.errors import InvalidRequest
from flowfleet.proto.reward_pb2 import (
    DescribeRequest,
    DescribeResponse,
    RewardScore,
    ScoreRequest,
    ScoreResponse,
)
from flowfleet.proto.reward_pb2_grpc import RewardServiceServicer
from flowfleet.reward_requests import CONTRACT, check_request, size_of
from services.reward.batcher import Limits
from services.reward.engines import Engine
from services.reward.metrics import RewardMetrics
from services.reward.scorers.base import Outcome, Problem


class RewardServicer(RewardServiceServicer):
    """Serves the scorer of an engine, which reads parameters and describes itself here. `start` inside the event loop
    before serving, `drain` when health says not serving."""

    def __init__(self, engine: Engine, limits: Limits, metrics: RewardMetrics) -> None:
        self._engine = engine
        self._scorer = engine.scorer
        self._limits = limits
        self._metrics = metrics

    async def start(self) -> None:
        await self._engine.start()

    async def drain(self) -> None:
        """Finishes what was admitted; every later call gets UNAVAILABLE."""
        await self._engine.drain()

    async def Describe(self, request: DescribeRequest, context: Any) -> DescribeResponse:
        scorer = self._scorer
        return DescribeResponse(
            name=scorer.name,
            version=scorer.version,
            modalities=scorer.modalities,
            score_min=scorer.score_range[0],
            score_max=scorer.score_range[1],
            max_batch_size=self._limits.max_batch,
            needs_group=scorer.needs_group,
            components=scorer.components,
            contract=CONTRACT,
        )

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        with self._metrics.request():
            check_request(request, self._limits.max_batch)
            params = self._parse(request.params)
            outcomes = await self._engine.score(request.samples, params, sum(map(size_of, request.samples)))
            pairs = zip(request.samples, outcomes, strict=True)
            scores = [_score(sample.sample_id, outcome) for sample, outcome in pairs]
            return ScoreResponse(scores=scores, version=self._scorer.version)

    def _parse(self, params: Mapping[str, str]) -> Any:
        try:
            return self._scorer.parse(params)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error


def _score(sample_id: str, outcome: Outcome) -> RewardScore:
    if isinstance(outcome, Problem):
        return RewardScore(sample_id=sample_id, error=outcome.message)
    return RewardScore(sample_id=sample_id, score=outcome.value, components=outcome.components)
