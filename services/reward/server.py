"""The RewardService: checks a call, hands its samples to the engine, and answers with one outcome a sample."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import grpc

from flowfleet.errors import InvalidRequest
from flowfleet.proto.reward_pb2 import (
    DescribeRequest,
    DescribeResponse,
    PixelSample,
    PixelScore,
    RewardScore,
    ScoreResponse,
    ScoreWithGradientRequest,
    ScoreWithGradientResponse,
)
from flowfleet.rewards.gradients import GRADIENT, MAX_GRADIENT_BYTES, PixelInput, write_tensor
from flowfleet.rewards.requests import SERVICE_NAME, ScoreCall, check_ids, contract_of, no_gradient
from services.reward.execution.batcher import Limits
from services.reward.execution.engines import Batched, Engine
from services.reward.metrics import RewardMetrics
from services.reward.scorer import GradientOutcome, Outcome, Pending, Problem

BAD_PIXELS: Final = "pixels"
"""Reason of samples whose pixels are not a picture, in metrics."""


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
            "ScoreWithGradient": grpc.unary_unary_rpc_method_handler(
                self.ScoreWithGradient,
                ScoreWithGradientRequest.FromString,
                ScoreWithGradientResponse.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def start(self) -> None:
        await self._engine.start()

    async def drain(self) -> None:
        """Finishes what was admitted; every later call gets UNAVAILABLE."""
        await self._engine.drain()

    async def Describe(self, request: DescribeRequest, context: Any) -> DescribeResponse:
        scorer, gives_gradient = self._scorer, self._engine.gives_gradient
        return DescribeResponse(
            name=scorer.name,
            version=scorer.version,
            modalities=scorer.modalities,
            score_min=scorer.score_range[0],
            score_max=scorer.score_range[1],
            max_batch_size=self._limits.max_batch,
            needs_group=scorer.needs_group,
            components=scorer.components,
            contract=contract_of(may_wait=scorer.may_wait, gives_gradient=gives_gradient),
            call_bytes=scorer.call_bytes,
            gives_gradient=gives_gradient,
            gradient_bytes=MAX_GRADIENT_BYTES if gives_gradient else 0,
        )

    async def Score(self, call: ScoreCall, context: Any) -> ScoreResponse:
        with self._metrics.request():
            check_ids((sample.sample_id for sample in call.samples), self._limits.max_batch)
            params = self._parse(call.params)
            outcomes = await self._engine.score(call.samples, params, call.num_bytes)
            pairs = zip(call.samples, outcomes, strict=True)
            scores = [_score(sample.sample_id, outcome) for sample, outcome in pairs]
            return ScoreResponse(scores=scores, version=self._scorer.version)

    async def ScoreWithGradient(self, request: ScoreWithGradientRequest, context: Any) -> ScoreWithGradientResponse:
        engine = self._engine
        if not (isinstance(engine, Batched) and engine.gives_gradient):
            await no_gradient(context)
        with self._metrics.request():
            check_ids((sample.sample_id for sample in request.samples), self._limits.max_batch)
            params = self._parse(request.params)
            read = await asyncio.to_thread(lambda: [_read(sample) for sample in request.samples])
            sound = [sample for sample in read if isinstance(sample, PixelInput)]
            num_bytes = sum(sample.pixels.nbytes for sample in sound)
            scored = iter(await engine.score_with_gradient(sound, params, num_bytes) if sound else [])
            outcomes = [next(scored) if isinstance(sample, PixelInput) else sample for sample in read]
            pairs = zip(request.samples, outcomes, strict=True)
            scores = [_pixel_score(sample.sample_id, outcome) for sample, outcome in pairs]
            return ScoreWithGradientResponse(scores=scores, version=self._scorer.version)

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


def _read(sample: PixelSample) -> PixelInput | Problem:
    try:
        return PixelInput.of(sample)
    except ValueError as error:
        return Problem(BAD_PIXELS, str(error))


def _pixel_score(sample_id: str, outcome: GradientOutcome) -> PixelScore:
    if isinstance(outcome, Problem):
        return PixelScore(sample_id=sample_id, error=outcome.message)
    return PixelScore(
        sample_id=sample_id,
        score=outcome.value,
        gradient=write_tensor(outcome.gradient, GRADIENT),
        components=outcome.components,
    )
