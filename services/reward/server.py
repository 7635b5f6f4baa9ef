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
from services.reward.batcher import Limits
from services.reward.engines import Engine
from services.reward.metrics import RewardMetrics
from services.reward.scorers.base import Outcome, Problem

SERVICE_NAME = "flowfleet.v1.RewardService"
CONTRACT = 1
"""Version of reward.proto that is spoken."""


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
            self._check(request)
            params = self._parse(request.params)
            outcomes = await self._engine.score(request.samples, params, request.ByteSize())
            pairs = zip(request.samples, outcomes, strict=True)
            scores = [_score(sample.sample_id, outcome) for sample, outcome in pairs]
            return ScoreResponse(scores=scores, version=self._scorer.version)

    def _check(self, request: ScoreRequest) -> None:
        """InvalidRequest for a request that cannot be answered as a whole."""
        ids = [sample.sample_id for sample in request.samples]
        if not ids:
            raise InvalidRequest("samples is empty: send at least one")
        if len(ids) > self._limits.max_batch:
            raise InvalidRequest(
                f"{len(ids)} samples in one call, the limit is {self._limits.max_batch}: split the call "
                "(Describe gives the limit as max_batch_size)"
            )
        if not all(ids):
            raise InvalidRequest(f"samples[{ids.index('')}].sample_id is empty: scores are matched by it")
        if len(set(ids)) < len(ids):
            twice = next(name for name in ids if ids.count(name) > 1)
            raise InvalidRequest(f"sample_id {twice!r} occurs twice in one call: scores are matched by it")

    def _parse(self, params: Mapping[str, str]) -> Any:
        try:
            return self._scorer.parse(params)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error


def _score(sample_id: str, outcome: Outcome) -> RewardScore:
    if isinstance(outcome, Problem):
        return RewardScore(sample_id=sample_id, error=outcome.message)
    return RewardScore(sample_id=sample_id, score=outcome.value, components=outcome.components)
