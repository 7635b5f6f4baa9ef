"""Session of the checks: the options of a run, a channel, the samples, and the scores given so far."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import grpc
import grpc.aio
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flowfleet.conformance import media
from flowfleet.conformance.media import Media
from flowfleet.proto import reward_pb2_grpc
from flowfleet.proto.reward_pb2 import (
    MODALITY_IMAGE,
    MODALITY_SOUND,
    MODALITY_TEXT,
    MODALITY_VIDEO,
    DescribeRequest,
    DescribeResponse,
    PixelScore,
    RewardSample,
    RewardScore,
    ScoreRequest,
    ScoreResponse,
    ScoreWithGradientRequest,
    ScoreWithGradientResponse,
)
from flowfleet.rewards.gradients import MAX_GRADIENT_BYTES, PixelInput, cut
from flowfleet.rpc import endpoint as rpc
from flowfleet.rpc import tls

UNLIMITED_BATCH: Final = 128
"""Samples of a full batch where Describe names no limit: as many as the controller sends."""
GROUP: Final = 4
"""Samples of a group."""
ABANDONED_AT_ONCE: Final = 64
ABANDONED_SAMPLES: Final = 16
ABANDONED_BYTES: Final = 2**20
"""Size of one abandoned call, which has a group at least."""

Score = TypeVar("Score", RewardScore, PixelScore)
Answer = ScoreResponse | grpc.aio.AioRpcError
"""Answer to a call that may be rejected."""


@dataclass(frozen=True)
class Options:
    """Options of a run. The service must be able to score the samples."""

    prompt: str = f'a sign that says "{media.WORD}" moves to the right'
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of each sample, as a line of the data set has it."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Parameters of each call, as a job's reward entry has them."""
    images: Sequence[Path] = ()
    """Pictures, videos or texts to send instead of those that the suite makes."""
    timeout_s: float = 60.0
    """Timeout of each call."""
    allowed_s: float = 2.0
    """Time allowed for the call after abandoned calls, beyond a full batch that may still be running."""
    connect_s: float = 10.0
    """Time within which the service must answer for the first time."""
    tolerance: float = 1e-3
    """Maximum difference between scores of one sample, relative to the larger of 1 and the score."""
    num_abandoned: int = 256
    """Calls that are cancelled, and as many that pass their deadline: more than a service has threads."""
    max_batch: int = 1024
    """The largest batch that is sent, whatever Describe allows."""
    large_call_bytes: int = 31 * 2**20
    """Size of the call that shows whether large calls are accepted; the controller sends at most 32 MiB."""
    ca: Path | None = None
    """PEM file of the CA that signed the certificate of a grpcs:// address."""
    cert: Path | None = None
    """PEM file of the certificate to show to a grpcs:// address."""
    key: Path | None = None
    """PEM file of its key."""


def open_channel(address: str, options: Options) -> grpc.aio.Channel:
    """A channel to grpc://host:port (plain), grpcs://host:port (TLS), or host:port as the fleet's environment says.

    ValueError for another address, and for settings that do not go with it.
    """
    scheme, has_scheme, target = address.rpartition("://")
    host, _, port = target.rpartition(":")
    if scheme not in ("", "grpc", "grpcs") or not host or not port.isdecimal():
        raise ValueError(f"{address!r} is no address: give grpc://host:port or grpcs://host:port")
    fleet_tls = tls.from_env() is not None
    own_tls = any((options.ca, options.cert, options.key))
    if own_tls and scheme != "grpcs":
        raise ValueError(f"--ca, --cert and --key are for TLS: say grpcs://{target}")
    if has_scheme and scheme == "grpc" and fleet_tls:
        raise ValueError(f"{address} is without TLS, but {tls.TLS_DIR} is set: say grpcs://{target}, or unset it")
    if (scheme == "grpcs" and not fleet_tls) or own_tls:
        if (options.cert is None) != (options.key is None):
            raise ValueError("--cert and --key go together: give both or none")
        ca, key, chain = (path.read_bytes() if path else None for path in (options.ca, options.key, options.cert))
        return rpc.open_channel_with(target, grpc.ssl_channel_credentials(ca, key, chain))
    return rpc.open_channel(target)


class Session:
    """A run against one service."""

    def __init__(self, channel: grpc.aio.Channel, options: Options) -> None:
        self.options = options
        self.channel = channel
        self._stub: reward_pb2_grpc.RewardServiceAsyncStub = reward_pb2_grpc.RewardServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._files = [media.read(path) for path in options.images]
        self.described = DescribeResponse()
        self.given: list[RewardScore] = []
        """Scores of all well-formed samples so far."""
        self.reference: dict[int, float] = {}
        """Picture → score, of the first batch; empty where the service does not repeat itself."""
        self.batch_limit = options.max_batch
        """Limit on the samples of a call, whatever Describe allows."""
        self.batch_s = 0.0
        """Seconds that a full batch took."""

    # -- what the service says of itself ------------------------------------------------------------------------------

    async def describe(self, timeout_s: float | None = None) -> DescribeResponse:
        return await self._stub.Describe(DescribeRequest(), timeout=timeout_s or self.options.timeout_s)

    async def health(self, service: str = "") -> str:
        """Health status, such as "SERVING"."""
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await self._health.Check(request, timeout=self.options.connect_s)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    @property
    def takes_pictures(self) -> bool:
        """True if the service scores pictures. One that names no modality counts as such."""
        return MODALITY_IMAGE in self.described.modalities or not self.described.modalities

    @property
    def takes_videos(self) -> bool:
        return MODALITY_VIDEO in self.described.modalities

    @property
    def takes_sounds(self) -> bool:
        return MODALITY_SOUND in self.described.modalities

    @property
    def takes_texts(self) -> bool:
        return MODALITY_TEXT in self.described.modalities

    @property
    def full_batch(self) -> int:
        return min(self.described.max_batch_size or UNLIMITED_BATCH, self.batch_limit)

    @property
    def few(self) -> int:
        """Samples of the smallest call: one, or a group of a service that wants whole groups."""
        return min(GROUP, self.full_batch) if self.described.needs_group else 1

    # -- samples ------------------------------------------------------------------------------------------------------

    def sample(self, index: int, sample_id: str = "", group_id: str = "group 0") -> RewardSample:
        """A sample that the service must be able to score. Equal indices are equal samples."""
        data, media_type = self.media(index)
        return RewardSample(
            sample_id=sample_id or f"check/{index:04d}",
            media=data,
            media_type=media_type,
            prompt=self.options.prompt,
            metadata=self.options.metadata,
            group_id=group_id,
        )

    def samples(self, count: int, group_id: str = "group 0") -> list[RewardSample]:
        return [self.sample(index, group_id=group_id) for index in range(count)]

    def media(self, index: int) -> Media:
        if self._files:
            return self._files[index % len(self._files)]
        if self.takes_pictures:
            return media.picture(index % 8)
        if self.takes_sounds:
            return media.film(index % 8)
        return media.video(index % 8) if self.takes_videos else media.answer(index % 8)

    def with_media(self, sample: RewardSample, file: Media) -> RewardSample:
        changed = RewardSample()
        changed.CopyFrom(sample)
        changed.media, changed.media_type = file
        return changed

    # -- calls --------------------------------------------------------------------------------------------------------

    async def score(
        self, samples: Sequence[RewardSample], params: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> ScoreResponse:
        """Raises grpc.aio.AioRpcError. The scores do not go to `given`."""
        request = ScoreRequest(samples=samples, params={**self.options.params, **(params or {})})
        return await self._stub.Score(request, timeout=timeout_s or self.options.timeout_s)

    async def ask(self, samples: Sequence[RewardSample], params: Mapping[str, str] | None = None) -> Answer:
        """The answer, or the error that the call ended with."""
        try:
            return await self.score(samples, params)
        except grpc.aio.AioRpcError as error:
            return error

    async def scores(self, samples: Sequence[RewardSample]) -> dict[str, RewardScore]:
        """Scores by id, of well-formed samples; the first of several of one id."""
        response = await self.score(samples)
        self.given.extend(response.scores)
        return by_id(response.scores)

    async def score_with_gradient(self, samples: Sequence[PixelInput]) -> ScoreWithGradientResponse:
        """Raises grpc.aio.AioRpcError."""
        request = ScoreWithGradientRequest(
            samples=[sample.message() for sample in samples], params=dict(self.options.params)
        )
        return await self._stub.ScoreWithGradient(request, timeout=self.options.timeout_s)

    async def gradients(self, samples: Sequence[PixelInput]) -> dict[str, PixelScore]:
        """Answers by id, the first of several of one id, in as many calls as the service wants."""
        calls = cut(samples, self.full_batch, self.described.gradient_bytes or MAX_GRADIENT_BYTES)
        return by_id([score for call in calls for score in (await self.score_with_gradient(call)).scores])

    async def seconds(self, samples: Sequence[RewardSample]) -> float:
        """Time that a call takes."""
        start = time.monotonic()
        await self.scores(samples)
        return time.monotonic() - start

    async def abandon(self, after_s: float, *, cancel: bool) -> list[grpc.StatusCode | None]:
        """Makes `num_abandoned` calls, some at once, and leaves them after so long, by cancelling or by a deadline.

        The codes they ended with; None for those that were answered before.
        """
        size = max(1, len(self.media(0)[0]))
        batch = self.samples(max(self.few, min(self.full_batch, ABANDONED_SAMPLES, ABANDONED_BYTES // size)))
        codes: list[grpc.StatusCode | None] = []
        for start in range(0, self.options.num_abandoned, ABANDONED_AT_ONCE):
            count = min(ABANDONED_AT_ONCE, self.options.num_abandoned - start)
            codes += await self._abandon(batch, count, after_s, cancel=cancel)
        return codes

    async def _abandon(
        self, batch: Sequence[RewardSample], num_calls: int, after_s: float, *, cancel: bool
    ) -> list[grpc.StatusCode | None]:

        async def one() -> grpc.StatusCode | None:
            try:
                await self.score(batch, timeout_s=None if cancel else after_s)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return None

        calls = [asyncio.create_task(one()) for _ in range(num_calls)]
        if cancel:
            await asyncio.sleep(after_s)
            for call in calls:
                call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        return [StatusCode.CANCELLED if isinstance(code, BaseException) else code for code in ended]


def by_id(scores: Sequence[Score]) -> dict[str, Score]:
    """Maps ids to scores; keeps the first of several with one id."""
    return {score.sample_id: score for score in reversed(scores)}
