"""A reward from a function: `serve` makes it a service that keeps to the contract of rewards (docs/rewards.md).

    def brightness(sample: Sample) -> float:
        return float(sample.frames.mean() / 255)

    if __name__ == "__main__":
        sys.exit(serve(brightness, name="brightness", version="1", score_range=(0.0, 1.0)))

The function gets a sample, or with `batch=True` all samples of a call, and gives a score, or a score and components. To
say why a sample has none it raises ValueError, whose words reach the caller; a batch function may also return such
an error in a score's place. With `may_wait=True` it raises or returns `Pending` for a score that comes later. Any other
exception is logged, and costs only what was asked with it. The function may be `async`. Requests, ids, media, scores
that are not finite, limits, cancelled calls, health, TLS and the drain on SIGTERM are dealt with here. For batches
across calls, pools of processes and metrics see services/reward.
"""

import argparse
import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError

from flowfleet.errors import TooLarge
from flowfleet.media.files import PICTURE_TYPES, VIDEO_TYPES, Frames, OpenedMedia, open_media
from flowfleet.media.sound import SOUND_TYPES, OpenedSound, decode_sound
from flowfleet.media.text import TEXT_TYPE, OpenedText, open_text
from flowfleet.process.pulse import HANG_S, Pulse, add_pulse_arguments
from flowfleet.process.service import rpc_parser, run_service, serving
from flowfleet.proto.reward_pb2 import (
    MODALITY_IMAGE,
    MODALITY_SOUND,
    MODALITY_TEXT,
    MODALITY_VIDEO,
    DescribeRequest,
    DescribeResponse,
    RewardSample,
    RewardScore,
    ScoreRequest,
    ScoreResponse,
    ScoreWithGradientRequest,
    ScoreWithGradientResponse,
)
from flowfleet.proto.reward_pb2_grpc import RewardServiceServicer, add_RewardServiceServicer_to_server
from flowfleet.rewards.requests import SERVICE_NAME, check_ids, contract_of, no_gradient
from flowfleet.rpc import endpoint as rpc

MAX_WAITING: Final = 8192
"""Samples of all calls at once; a call beyond gets RESOURCE_EXHAUSTED."""
MAX_WAITING_BYTES: Final = 2**30
"""Maximum size of the waiting samples' media."""
GRACE_S: Final = 60.0
"""Time that running calls have after SIGTERM."""
_MODALITIES: Final = {
    "image": (MODALITY_IMAGE, tuple(PICTURE_TYPES)),
    "video": (MODALITY_VIDEO, VIDEO_TYPES),
    "text": (MODALITY_TEXT, (TEXT_TYPE,)),
    "sound": (MODALITY_SOUND, (*VIDEO_TYPES, *SOUND_TYPES)),
}

Scored = float | tuple[float, Mapping[str, float]] | Mapping[str, float]
"""A score, or a score and its components by name."""

log = logging.getLogger(__name__)


class Pending(Exception):
    """Pending score: a function of a reward that `may_wait` raises it, or returns it among a batch's scores. The
    message names what it waits for. The job asks again for as long as its `timeouts.pending_s`."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Sample as a score function sees it. The header of its media has been read and is within `MediaLimits`. Pixels are
    decoded when they are first asked for; ValueError is raised where that fails."""

    sample_id: str
    prompt: str
    metadata: Mapping[str, str]
    """Metadata of the prompt's line in the data set."""
    group_id: str
    """Equal for the samples of one prompt in one step."""
    opened: OpenedMedia | OpenedText | OpenedSound

    @property
    def media(self) -> bytes:
        """The file as it came."""
        return self.opened.data

    @property
    def media_type(self) -> str:
        """Media type, such as "image/png"."""
        return self.opened.media_type

    @cached_property
    def frames(self) -> Frames:
        """(F, H, W, 3) uint8 RGB; F is 1 for a picture. ValueError for a text."""
        if isinstance(self.opened, OpenedMedia):
            return self.opened.decode()
        raise ValueError(f"{self.media_type} has no frames here: `text` has an answer, `sound` a sound")

    @cached_property
    def sound(self) -> NDArray[np.float32]:
        """(samples,) from -1 to 1, one channel of 16,000 a second. ValueError for a film without sound."""
        return decode_sound(self.media, self.media_type)

    @property
    def text(self) -> str:
        """The answer of a policy that writes. ValueError for a picture or video."""
        if isinstance(self.opened, OpenedText):
            return self.opened.text
        raise ValueError(f"{self.media_type} is not a text: `image` and `frames` have its pixels")

    @cached_property
    def image(self) -> Image.Image:
        """The picture, of a video the first frame; RGB."""
        return Image.fromarray(self.frames[0])


class Params(BaseModel):
    """Base of a reward's parameters: one field each, with a default. A job gives them as text."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Score function and the settings that Describe reports."""

    score: Callable[..., Any]
    """Scores a `Sample`, or with `batch` a list of them; takes `params` as well if set. Returns `Scored`, or a list of
    `Scored` and ValueErrors, in order. A plain function runs in one of `threads` threads."""
    name: str
    version: str
    """Change it whenever the same sample could get another score."""
    score_range: tuple[float, float] = (-math.inf, math.inf)
    """Least and greatest score; ±infinity where there is no bound."""
    modalities: Sequence[str] = ("image",)
    """Modalities among "image", "video", "text" and "sound"."""
    components: Sequence[str] = ()
    """Names of all components that `score` may give."""
    params: type[Params] | None = None
    """Parameters that a job may set; others are refused."""
    batch: bool = False
    """`score` takes the samples of a call at once; with `needs_group`, those of one group."""
    needs_group: bool = False
    """The controller sends all samples of a group in one call."""
    max_batch_size: int = 64
    """Samples of a call."""
    may_wait: bool = False
    """`score` may raise `Pending`; needs controllers of contract 2."""
    threads: int = 1
    """Calls of a plain `score` that run at once."""
    hang_s: float = HANG_S
    """A plain `score` that runs for longer than this, and than four times its longest call so far, is taken for hung:
    health denies, so that the service is killed and started again. The first call has 900 s. Raise it if yours is
    slow, with the jobs' `timeouts.score_s`."""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that the contract does not allow."""
        low, high = self.score_range
        wrong = {
            "name and version": not (self.name and self.version),
            "score_range (least before greatest)": not low < high,
            f"modalities (of {', '.join(_MODALITIES)})": not self.modalities or set(self.modalities) - set(_MODALITIES),
            "components (each once)": not all(self.components) or len(set(self.components)) < len(self.components),
            "batch (needs_group goes with it)": self.needs_group and not self.batch,
            "max_batch_size (at least 1, with needs_group 2)": self.max_batch_size < 1 + self.needs_group,
            "threads (at least 1)": self.threads < 1,
        }
        if broken := [setting for setting, is_wrong in wrong.items() if is_wrong]:
            raise ValueError(f"the reward {self.name!r} cannot be served: give {'; '.join(broken)}")

    @property
    def media_types(self) -> tuple[str, ...]:
        """Media types that the reward reads."""
        return tuple(name for modality in self.modalities for name in _MODALITIES[modality][1])

    @property
    def is_async(self) -> bool:
        """True if `score` is a coroutine function."""
        return any(map(inspect.iscoroutinefunction, (self.score, type(self.score).__call__)))

    def describe(self) -> DescribeResponse:
        """The answer of Describe."""
        return DescribeResponse(
            name=self.name,
            version=self.version,
            modalities=[_MODALITIES[modality][0] for modality in self.modalities],
            score_min=self.score_range[0],
            score_max=self.score_range[1],
            max_batch_size=self.max_batch_size,
            needs_group=self.needs_group,
            components=self.components,
            contract=contract_of(may_wait=self.may_wait),
        )

    def answer(self, sample_id: str, outcome: Scored | Exception, media_size: int) -> RewardScore:
        """Returns the answer for the caller. Only a reward that `may_wait` may answer with a pending score."""
        if isinstance(outcome, Pending) and self.may_wait:
            return RewardScore(sample_id=sample_id, pending=str(outcome) or "the score is not there yet")
        return answer(sample_id, outcome, self.components, media_size)


def serve(score: Callable[..., Any], *, argv: Sequence[str] | None = None, **settings: Any) -> int:
    """Serves a `Reward` of the function and these settings until SIGTERM; returns the exit code. The program's `--help`
    tells its flags. ValueError for settings that cannot work."""
    reward = Reward(score=score, **settings)
    parser = rpc_parser((inspect.getdoc(score) or f"The reward {reward.name}.").partition("\n")[0])
    add_pulse_arguments(parser, reward.hang_s)
    return run_service("reward", functools.partial(_serve, reward), parser, argv)


async def _serve(reward: Reward, options: argparse.Namespace) -> None:
    server = rpc.make_server()
    pulse = Pulse(options.hang_s, options.stall_s)
    add_RewardServiceServicer_to_server(RewardServicer(reward, pulse), server)
    await rpc.serve(
        server,
        **serving(options),
        health=rpc.HealthState(SERVICE_NAME),
        is_stuck=lambda: pulse.is_stuck,
        grace_s=GRACE_S,
    )


class RewardServicer(RewardServiceServicer):
    """Service of a reward, for a server that also does other things."""

    def __init__(self, reward: Reward, pulse: Pulse | None = None) -> None:
        self._reward = reward
        self._pulse = pulse or Pulse(reward.hang_s)
        self._threads = ThreadPoolExecutor(reward.threads, thread_name_prefix="score")
        self._waiting = self._waiting_bytes = 0

    async def Describe(self, request: DescribeRequest, context: Any) -> DescribeResponse:
        return self._reward.describe()

    async def ScoreWithGradient(self, request: ScoreWithGradientRequest, context: Any) -> ScoreWithGradientResponse:
        await no_gradient(context)

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        reward, count = self._reward, len(request.samples)
        check_ids((sample.sample_id for sample in request.samples), reward.max_batch_size)
        params = read_params(reward.params, request.params)
        with self._admitted(count, sum(len(sample.media) for sample in request.samples)):
            outcomes = await (self._score_batch if reward.batch else self._score_each)(request.samples, params)
        answers = [
            reward.answer(sample.sample_id, outcome, 0 if reward.batch else len(sample.media))
            for sample, outcome in zip(request.samples, outcomes, strict=True)
        ]
        return ScoreResponse(scores=answers, version=reward.version)

    @contextmanager
    def _admitted(self, count: int, size: int) -> Iterator[None]:
        """Raises TooLarge if the samples or bytes do not fit in the queue; an empty queue takes any call."""
        if self._waiting + count > MAX_WAITING or (self._waiting and self._waiting_bytes + size > MAX_WAITING_BYTES):
            raise TooLarge(
                f"{self._waiting} samples of {self._waiting_bytes} bytes wait, at most {MAX_WAITING} of "
                f"{MAX_WAITING_BYTES} may: send fewer, or start a replica"
            )
        self._waiting += count
        self._waiting_bytes += size
        try:
            yield
        finally:
            self._waiting -= count
            self._waiting_bytes -= size

    async def _score_each(self, samples: Sequence[RewardSample], params: tuple[Any, ...]) -> list[Any]:
        """Returns one outcome per sample, in order. Only the media of samples that are being scored are decoded."""
        return await asyncio.gather(*(self._score_one(sample, params) for sample in samples))

    async def _score_one(self, sample: RewardSample, params: tuple[Any, ...]) -> Any:
        opened = await self._in_thread(self._open, sample)
        return opened if isinstance(opened, Exception) else await self._call(opened, *params)

    async def _score_batch(self, samples: Sequence[RewardSample], params: tuple[Any, ...]) -> list[Any]:
        """Scores the samples together and returns an outcome per sample, in order."""
        outcomes = list(await asyncio.gather(*(self._in_thread(self._open, sample) for sample in samples)))
        groups: dict[str, list[int]] = {}
        for index, opened in enumerate(outcomes):
            if isinstance(opened, Sample):
                groups.setdefault(opened.group_id if self._reward.needs_group else "", []).append(index)
        for indices in groups.values():
            scored = await self._score_together([outcomes[index] for index in indices], params)
            for index, outcome in zip(indices, scored, strict=True):
                outcomes[index] = outcome
        return outcomes

    async def _score_together(self, samples: list[Sample], params: tuple[Any, ...]) -> list[Any]:
        """Where the function fails on several, each is asked alone, unless the function must see the whole group."""
        scores = await self._call(samples, *params)
        if not isinstance(scores, Exception):
            if len(scores) == len(samples):
                return list(scores)
            log.error("%s gave %d scores for %d samples", self._reward.name, len(scores), len(samples))
            scores = RuntimeError(f"{self._reward.name} gave {len(scores)} scores for {len(samples)} samples")
        if len(samples) == 1 or self._reward.needs_group:
            return [scores] * len(samples)
        return [outcome for sample in samples for outcome in await self._score_together([sample], params)]

    async def _call(self, *given: Any) -> Any:
        """Returns the function's result, or the exception to report in its place."""
        if not self._reward.is_async:
            return await self._in_thread(self._watched, *given)
        try:
            return await self._reward.score(*given)
        except Exception as error:
            return self._told(error)

    def _watched(self, *given: Any) -> Any:
        with self._pulse.work("score", len(given[0]) if self._reward.batch else 1):
            return self._reward.score(*given)

    async def _in_thread(self, function: Callable[..., Any], *given: Any) -> Any:
        """Runs a function in a thread. If the caller leaves before it has begun, it never runs."""

        def guarded() -> Any:
            try:
                return function(*given)
            except Exception as error:
                return self._told(error)

        return await asyncio.get_running_loop().run_in_executor(self._threads, guarded)

    def _told(self, error: Exception) -> Exception:
        """Returns the exception as the caller may see it."""
        if isinstance(error, ValueError) or (isinstance(error, Pending) and self._reward.may_wait):
            return error
        log.error("%s failed", self._reward.name, exc_info=error)
        return RuntimeError(
            f"{self._reward.name} failed on this sample: {type(error).__name__}; its log has the reason"
        )

    def _open(self, sample: RewardSample) -> Sample:
        types = self._reward.media_types
        if sample.media_type not in types:
            raise ValueError(f"media_type {sample.media_type!r} is not read here: send {', '.join(types)}")
        given = sample.prompt, dict(sample.metadata), sample.group_id
        return Sample(sample.sample_id, *given, self._opened(sample.media, sample.media_type))

    def _opened(self, media: bytes, media_type: str) -> OpenedMedia | OpenedText | OpenedSound:
        if media_type == TEXT_TYPE:
            return open_text(media)
        return OpenedSound(media, media_type) if media_type in SOUND_TYPES else open_media(media, media_type)


def read_params(model: type[Params] | None, given: Mapping[str, str]) -> tuple[Params, ...]:
    """Returns the score function's arguments for a call's parameters. ValueError names the parameter to change."""
    known = () if model is None else tuple(model.model_fields)
    for name in given:
        if name not in known:
            raise ValueError(f"params.{name} is unknown: this reward takes {', '.join(known) or 'no parameters'}")
    if model is None:
        return ()
    try:
        return (model.model_validate(dict(given)),)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"params.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def answer(sample_id: str, outcome: Scored | Exception, components: Sequence[str], media_size: int = 0) -> RewardScore:
    """Returns the caller's answer: an error if the score is missing or not finite, or a component was never named."""
    try:
        if isinstance(outcome, Exception):
            raise outcome
        score: Any
        parts: Mapping[str, float]
        if isinstance(outcome, Mapping):
            score, parts = outcome.get("score"), {name: part for name, part in outcome.items() if name != "score"}
        else:
            score, parts = outcome if isinstance(outcome, tuple) else (outcome, {})
        named = {"the score": _number("the score", score)}
        named |= {name: _number(f"component {name}", value) for name, value in parts.items()}
        if strange := [name for name in parts if name not in components]:
            raise ValueError(
                f"component {strange[0]} is not among those of Describe: {', '.join(components) or 'none'}"
            )
    except Exception as error:
        return RewardScore(sample_id=sample_id, error=str(error) or type(error).__name__)
    return RewardScore(sample_id=sample_id, score=named.pop("the score"), components=named, media_size=media_size)


def _number(what: str, value: Any) -> float:
    if isinstance(value, str | None):
        raise ValueError(f"{what} is {value!r}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}")
    return number
