"""A reward service written from the contract alone, and its deliberately wrong brothers: one for each rule."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image
from safetensors.numpy import load, save

from flowfleet.conformance import Options, Report, check
from flowfleet.proto.reward_pb2 import (
    MODALITY_IMAGE,
    DescribeRequest,
    DescribeResponse,
    PixelSample,
    PixelScore,
    RewardSample,
    RewardScore,
    ScoreRequest,
    ScoreResponse,
    ScoreWithGradientRequest,
    ScoreWithGradientResponse,
)
from flowfleet.proto.reward_pb2_grpc import RewardServiceServicer, add_RewardServiceServicer_to_server

MAX_PIXELS = 2**24
NAN = float("nan")
INVALID, INTERNAL = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL
OPTIONS = Options(timeout_s=20, connect_s=10, allowed_s=15, large_call_bytes=5 * 2**20, num_abandoned=12)


class Right(RewardServiceServicer):
    """Mean gray value of a PNG, 0 to 1. Keeps the whole contract; wrong ones override what they break."""

    serving: bool | None = True
    """What health says; None: there is none."""
    max_message_bytes = 64 * 2**20
    max_batch = 8

    def __init__(self) -> None:
        self.count = itertools.count()

    def describe(self) -> dict[str, Any]:
        about = {"name": "gray", "version": "1", "modalities": [MODALITY_IMAGE], "score_min": 0.0, "score_max": 1.0}
        return {**about, "max_batch_size": self.max_batch, "components": ["mean"], "contract": 1}

    def refusal(self, request: ScoreRequest) -> str:
        ids = [sample.sample_id for sample in request.samples]
        if not ids or len(ids) > self.max_batch:
            return f"{len(ids)} samples: send 1 to {self.max_batch}"
        if "" in ids or len(set(ids)) < len(ids):
            return "each sample needs an id of its own"
        return f"{next(iter(request.params))}: there are no params" if request.params else ""

    def value(self, sample: RewardSample) -> float:
        if sample.media_type != "image/png":
            raise ValueError(f"{sample.media_type} is not read")
        picture = Image.open(io.BytesIO(sample.media), formats=["PNG"])
        if picture.width * picture.height > MAX_PIXELS:
            raise ValueError("too large")
        return float(np.asarray(picture.convert("L")).mean() / 255)

    def outcome(self, sample: RewardSample) -> RewardScore:
        try:
            value = self.value(sample)
        except Exception as error:
            return RewardScore(sample_id=sample.sample_id, error=repr(error))
        size = len(sample.media)
        return RewardScore(sample_id=sample.sample_id, score=value, components={"mean": value}, media_size=size)

    def scores(self, request: ScoreRequest) -> list[RewardScore]:
        return [self.outcome(sample) for sample in request.samples]

    async def Describe(self, request: DescribeRequest, context: Any) -> DescribeResponse:
        return DescribeResponse(**self.describe())

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        if message := self.refusal(request):
            await context.abort(INVALID, message)
        return ScoreResponse(scores=self.scores(request))

    async def ScoreWithGradient(self, request: ScoreWithGradientRequest, context: Any) -> ScoreWithGradientResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there are no gradients")
        raise AssertionError("abort raises")


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    def __init__(self, serving: bool) -> None:
        self._status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        return health_pb2.HealthCheckResponse(status=self._status)


@asynccontextmanager
async def serving(service: RewardServiceServicer, healthy: bool | None = True, size: int = 2**26) -> AsyncIterator[str]:
    """host:port of the service, in this process; without a health service where `healthy` is None."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", size)])
    add_RewardServiceServicer_to_server(service, server)
    if healthy is not None:
        health_pb2_grpc.add_HealthServicer_to_server(Health(healthy), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def report_on(service: Right, options: Options = OPTIONS) -> Report:
    """Runs the suite against the service."""

    async def main() -> Report:
        async with serving(service, service.serving, service.max_message_bytes) as address:
            return await check(f"grpc://{address}", options)

    return asyncio.run(main())


# -- wrong ones ------------------------------------------------------------------------------------------------------


def describes(**changed: Any) -> Callable[[], Right]:
    """Says other things of itself."""

    class Describes(Right):
        def describe(self) -> dict[str, Any]:
            return {**super().describe(), **changed}

    return Describes


class NotServing(Right):
    serving = False


class WithoutHealth(Right):
    serving = None


class DescribesAnew(Right):
    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "version": f"of call {next(self.count) // 2}"}


class RefusesAll(Right):
    def value(self, sample: RewardSample) -> float:
        raise ValueError("no target")


class RefusesFullBatches(Right):
    def refusal(self, request: ScoreRequest) -> str:
        return "at most 7" if len(request.samples) == 8 else super().refusal(request)


class ForgetsOne(Right):
    def scores(self, request: ScoreRequest) -> list[RewardScore]:
        return super().scores(request)[: max(1, len(request.samples) - 1)]


class AnswersTwice(Right):
    def scores(self, request: ScoreRequest) -> list[RewardScore]:
        return super().scores(request) + super().scores(request)[:1]


class InventsIds(Right):
    def scores(self, request: ScoreRequest) -> list[RewardScore]:
        return [*super().scores(request), RewardScore(sample_id="of another call", score=0.5)]


class ForgetsLateOnes(Right):
    """Has a buffer of 32."""

    max_batch = 64

    def scores(self, request: ScoreRequest) -> list[RewardScore]:
        return super().scores(request)[:32]


class LeavesLateOnesEmpty(Right):
    """Answers each sample, from the 21st on with nothing."""

    max_batch = 64

    def scores(self, request: ScoreRequest) -> list[RewardScore]:
        given = super().scores(request)
        return given[:20] + [RewardScore(sample_id=score.sample_id) for score in given[20:]]


class ShiftsLargeCalls(Right):
    """Off by one where a call has more than one batch of 32: all ids are there, and all scores are wrong."""

    max_batch = 64

    def scores(self, request: ScoreRequest) -> list[RewardScore]:
        given = super().scores(request)
        if len(given) > 32:
            for score, sample in zip(given, [*request.samples[1:], request.samples[0]], strict=True):
                score.CopyFrom(self.outcome(sample)) if score.HasField("score") else None
            for score, sample in zip(given, request.samples, strict=True):
                score.sample_id = sample.sample_id
                score.ClearField("media_size")
        return given


class TellsWrongSizes(Right):
    """Tells the size of the decoded picture."""

    def outcome(self, sample: RewardSample) -> RewardScore:
        given = super().outcome(sample)
        given.media_size *= 3
        return given


class AlwaysInfinite(Right):
    def value(self, sample: RewardSample) -> float:
        return super().value(sample) and float("inf")


class Unmarked(Right):
    """Allowed: tells no size, and has no components."""

    def outcome(self, sample: RewardSample) -> RewardScore:
        given = super().outcome(sample)
        given.ClearField("media_size")
        given.ClearField("components")
        return given


class MixesUp(Right):
    """Puts the scores on the ids in the order of ids, as a table keyed by them would."""

    def scores(self, request: ScoreRequest) -> list[RewardScore]:
        given = super().scores(request)
        names = sorted(score.sample_id for score in given)
        for score, name in zip(given, names, strict=True):
            score.sample_id = name
        return given


class SeesOneGroup(Right):
    """Forgets all groups but the first."""

    def scores(self, request: ScoreRequest) -> list[RewardScore]:
        first = request.samples[0].group_id
        return [self.outcome(sample) for sample in request.samples if sample.group_id == first]


class AsciiOnly(Right):
    def value(self, sample: RewardSample) -> float:
        sample.prompt.encode("ascii")
        return super().value(sample)


class ShortPrompts(Right):
    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        if len(request.samples[0].prompt if request.samples else "") > 5000:
            await context.abort(INTERNAL, "buffer overrun")
        return await super().Score(request, context)


class StrictParser(Right):
    """Refuses fields that it does not know."""

    def refusal(self, request: ScoreRequest) -> str:
        known = ScoreRequest(samples=request.samples, params=request.params).ByteSize()
        return "an unknown field" if request.ByteSize() > known else super().refusal(request)


class TakesAnyNumber(Right):
    def refusal(self, request: ScoreRequest) -> str:
        return "" if len(request.samples) > 8 else super().refusal(request)


class TakesDuplicates(Right):
    def refusal(self, request: ScoreRequest) -> str:
        return "" if [one.sample_id for one in request.samples] == ["twice"] * 2 else super().refusal(request)


class TakesEmptyIds(Right):
    def refusal(self, request: ScoreRequest) -> str:
        return "" if any(not one.sample_id for one in request.samples) else super().refusal(request)


class CrashesOnNothing(Right):
    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        if not request.samples:
            await context.abort(INTERNAL, "list index out of range")
        return await super().Score(request, context)


class IgnoresParams(Right):
    def refusal(self, request: ScoreRequest) -> str:
        return super().refusal(ScoreRequest(samples=request.samples))


class RefusesWithoutWords(Right):
    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        if len(request.samples) > 8:
            await context.abort(INVALID, "")
        return await super().Score(request, context)


class FailsWholeCalls(Right):
    """One broken picture spoils the call."""

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        if any(sample.media.startswith(b"this is") for sample in request.samples):
            await context.abort(INTERNAL, "cannot identify image file")
        return await super().Score(request, context)


class ZeroForBroken(Right):
    """The silent zero."""

    def value(self, sample: RewardSample) -> float:
        return 0.0 if sample.media.startswith(b"this is") else super().value(sample)


class GuessesTypes(Right):
    def value(self, sample: RewardSample) -> float:
        if sample.media_type == "application/x-unheard-of":
            sample.media_type = "image/png"
        return super().value(sample)


class TrustsHeaders(Right):
    def value(self, sample: RewardSample) -> float:
        try:
            return super().value(sample)
        except Image.DecompressionBombError:
            return 0.5


class SmallMessages(Right):
    max_message_bytes = 2**22


class ScoresVideosByAccident(Right):
    def value(self, sample: RewardSample) -> float:
        return 0.5 if sample.media_type == "video/mp4" else super().value(sample)


class OneQueue(Right):
    """Finishes full calls whose caller is gone, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = asyncio.Lock()

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        return await asyncio.shield(asyncio.ensure_future(self._in_turn(request, context)))

    async def _in_turn(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        async with self.busy:
            answer = await super().Score(request, context)
            if len(request.samples) == 8:
                await asyncio.sleep(0.4)
            return answer


class ManyThreads(Right):
    """Works off all calls, left or not, on 16 threads."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = asyncio.Semaphore(16)

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        return await asyncio.shield(asyncio.ensure_future(self._on_a_thread(request, context)))

    async def _on_a_thread(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        async with self.threads:
            if len(request.samples) == 8:
                await asyncio.sleep(0.3)
            return await super().Score(request, context)


class SharesState(Right):
    """Calls at the same time see each other's samples."""

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        self.request = request
        await asyncio.sleep(0.02)
        if message := self.refusal(request):
            await context.abort(INVALID, message)
        given = self.scores(self.request)
        return ScoreResponse(scores=given)


class NotANumber(Right):
    def outcome(self, sample: RewardSample) -> RewardScore:
        given = super().outcome(sample)
        if given.WhichOneof("outcome") == "score" and sample.sample_id.endswith("0003"):
            given.score = NAN
        return given


class OutOfRange(Right):
    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "score_max": 0.25}


class StrangeComponent(Right):
    def outcome(self, sample: RewardSample) -> RewardScore:
        given = super().outcome(sample)
        given.components["surprise"] = 1.0
        return given


class BrokenComponent(Right):
    def outcome(self, sample: RewardSample) -> RewardScore:
        given = super().outcome(sample)
        given.components["mean"] = NAN
        return given


class Dice(Right):
    """Allowed: scores that differ from call to call."""

    def value(self, sample: RewardSample) -> float:
        return (super().value(sample) + 0.1 * next(self.count)) % 1.0


class Waits(Right):
    """Has no score yet of any picture that it can read."""

    words = "two of four votes"

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "contract": 2}

    def outcome(self, sample: RewardSample) -> RewardScore:
        found = super().outcome(sample)
        return found if found.error else RewardScore(sample_id=sample.sample_id, pending=self.words)


class WaitsUnannounced(Waits):
    def describe(self) -> dict[str, Any]:
        return Right.describe(self)


class WaitsInSilence(Waits):
    words = ""


# -- gradients -------------------------------------------------------------------------------------------------------


class Gradients(Right):
    """The same mean, with its gradient."""

    weights = np.array([0.299, 0.587, 0.114], np.float32)
    """Weights of the channels, as Pillow has them."""

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "contract": 2, "gives_gradient": True, "gradient_bytes": 2**24}

    def gradient(self, pixels: np.ndarray, number: int) -> np.ndarray:
        """`number`: of samples in the call."""
        return np.broadcast_to(self.weights[:, None, None] / pixels[0].size, pixels.shape)

    def pixel_score(self, sample: PixelSample, number: int) -> PixelScore:
        pixels = load(sample.pixels)["pixels"]
        if pixels.ndim != 3:
            return self.broken(sample)
        value = float(np.tensordot(self.weights.astype(np.float64), pixels.mean(axis=(1, 2), dtype=np.float64), 1))
        gradient = np.ascontiguousarray(self.gradient(pixels, number), np.float32)
        return PixelScore(sample_id=sample.sample_id, score=value, gradient=save({"gradient": gradient}))

    def broken(self, sample: PixelSample) -> PixelScore:
        return PixelScore(sample_id=sample.sample_id, error="send (3, height, width)")

    async def ScoreWithGradient(self, request: ScoreWithGradientRequest, context: Any) -> ScoreWithGradientResponse:
        number = len(request.samples)
        return ScoreWithGradientResponse(scores=[self.pixel_score(sample, number) for sample in request.samples])


class OldContract(Gradients):
    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "contract": 1}


class Transposed(Gradients):
    def gradient(self, pixels: np.ndarray, number: int) -> np.ndarray:
        return super().gradient(pixels, number).transpose(1, 2, 0)


class HalfAsFast(Gradients):
    def gradient(self, pixels: np.ndarray, number: int) -> np.ndarray:
        return super().gradient(pixels, number) / 2


class RightInTheMiddle(Gradients):
    """The sum is right, the place is not."""

    def gradient(self, pixels: np.ndarray, number: int) -> np.ndarray:
        found = np.array(super().gradient(pixels, number))
        middle = pixels.shape[2] // 2
        found[:, :, :middle], found[:, :, middle:] = 0.4 * found[:, :, :middle], 1.6 * found[:, :, middle:]
        return found


class MeanOfTheCall(Gradients):
    """Divides by the number of samples in the call, as the gradient of a batch's mean does."""

    def gradient(self, pixels: np.ndarray, number: int) -> np.ndarray:
        return super().gradient(pixels, number) * (1 if number in (1, 2, 8) else 1 / number)


class ZeroForBrokenPixels(Gradients):
    def broken(self, sample: PixelSample) -> PixelScore:
        return PixelScore(sample_id=sample.sample_id, score=0.0, gradient=save({"gradient": np.zeros((4, 4), "f4")}))


class SmallPictures(Gradients):
    def pixel_score(self, sample: PixelSample, number: int) -> PixelScore:
        if len(sample.pixels) > 2**22:
            return PixelScore(sample_id=sample.sample_id, error="out of memory")
        return super().pixel_score(sample, number)
