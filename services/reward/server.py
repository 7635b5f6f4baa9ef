"""The RewardService: checks a call, hands its samples to the engine, and answers with one outcome a sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from flowfleet.errors import InvalidRequest
from flowfleet.proto.reward_pb2 import DescribeRequest, DescribeResponse, RewardScore, ScoreResponse
from flowfleet.rewards.requests import SERVICE_NAME, ScoreCall, check_ids, contract_of
from services.reward.execution.batcher import Limits
from services.reward.execution.engines import Engine
from services.reward.metrics import RewardMetrics
from services.reward.scorer import Outcome, Pending, Problem


class RewardServicer:
    """Serves the scorer of an engine, which reads parameters and describes itself here. `start` inside the event loop
    before serving, `drain` when health says not serving."""

    def __init__(self, engine: Engine, limits: Limits, metrics: RewardMetrics) -> None:
        self._engine = engine
        self._scorer = engine.scorer
        self._limits = limits
        self._metrics = metrics

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Instead of the generated function: a call is kept as its samples, and their media once."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self.Describe, DescribeRequest.FromString, DescribeResponse.SerializeToString
            ),
            "Score": grpc.unary_unary_rpc_method_handler(self.Score, ScoreCall.read, ScoreResponse.SerializeToString),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

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
            contract=contract_of(scorer.may_wait),
            call_bytes=scorer.call_bytes,
        )

    async def Score(self, call: ScoreCall, context: Any) -> ScoreResponse:
        with self._metrics.request():
            check_ids((sample.sample_id for sample in call.samples), self._limits.max_batch)
            params = self._parse(call.params)
            outcomes = await self._engine.score(call.samples, params, call.num_bytes)
            pairs = zip(call.samples, outcomes, strict=True)
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
    if isinstance(outcome, Pending):
        return RewardScore(sample_id=sample_id, pending=outcome.message)
    size = outcome.media_size
    return RewardScore(sample_id=sample_id, score=outcome.value, components=outcome.components, media_size=size)
