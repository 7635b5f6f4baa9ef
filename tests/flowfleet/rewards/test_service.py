"""Rewards made of functions, served in this process over real gRPC."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import numpy as np
import pytest

from flowfleet.media.files import encode_media
from flowfleet.media.sound import Sound, encode_sound
from flowfleet.process.pulse import Pulse
from flowfleet.proto.reward_pb2 import DescribeRequest, RewardSample, ScoreRequest, ScoreResponse
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.rewards.service import Params, Pending, Reward, RewardServicer, Sample, answer, read_params, serve
from flowfleet.rpc import endpoint as rpc
from tests.serving import listening

if TYPE_CHECKING:
    from flowfleet.proto.reward_pb2_grpc import RewardServiceAsyncStub

PNG = encode_media(np.full((1, 4, 6, 3), 51, np.uint8))[0]
VIDEO = encode_media(np.zeros((5, 4, 6, 3), np.uint8))[0]


def request(*prompts: str, **params: str) -> ScoreRequest:
    """Request of pictures named by their places; each group is the prompt's first letter."""
    samples = [
        RewardSample(sample_id=str(place), media=PNG, media_type="image/png", prompt=prompt, group_id=prompt[:1])
        for place, prompt in enumerate(prompts)
    ]
    return ScoreRequest(samples=samples, params=params)


@asynccontextmanager
async def served(score: Callable[..., Any], **settings: Any) -> AsyncIterator[RewardServiceAsyncStub]:
    servicer = RewardServicer(Reward(score=score, **{"name": "mine", "version": "2", **settings}))
    async with (
        asyncio.timeout(60),
        listening(rpc.make_server(), servicer) as address,
        rpc.open_channel(address) as channel,
    ):
        yield RewardServiceStub(channel)


async def ask(sent: ScoreRequest, score: Callable[..., Any], **settings: Any) -> ScoreResponse:
    async with served(score, **settings) as stub:
        return await stub.Score(sent, timeout=30)


def shown(response: ScoreResponse) -> list[float | str]:
    return [one.error if one.WhichOneof("outcome") == "error" else one.score for one in response.scores]


async def test_a_score_that_comes_later_is_pending_where_the_reward_says_that_it_may_wait() -> None:
    def people(sample: Sample) -> float:
        raise Pending(f"votes on {sample.prompt}")

    def together(samples: list[Sample]) -> list[Any]:
        return [1.0 if sample.prompt == "a" else Pending("one vote") for sample in samples]

    assert (await ask(request("a"), people, may_wait=True)).scores[0].pending == "votes on a"
    batch = (await ask(request("a", "b"), together, may_wait=True, batch=True)).scores
    assert [one.WhichOneof("outcome") for one in batch] == ["score", "pending"]
    assert (await ask(request("a"), people)).scores[0].error  # callers were not told to expect it
    assert [
        Reward(score=people, name="a", version="1", may_wait=waits).describe().contract for waits in (False, True)
    ] == [
        1,
        2,
    ]


def moody(sample: Sample) -> Any:
    """Does what the prompt says."""
    match sample.prompt:
        case "refuse":
            raise ValueError("no face in it")
        case "crash":
            raise KeyError("secret")
        case "text":
            return "good"
        case "strange":
            return 1.0, {"other": 2.0}
        case "both":
            return 1, {"mean": np.float32(sample.frames.mean())}
        case _:
            return float(sample.prompt)


async def moody_later(sample: Sample) -> Any:
    await asyncio.sleep(0)
    return moody(sample)


MOODS = ("0.5", "refuse", "crash", "text", "nan", "strange", "both")
OUTCOMES = [
    0.5,
    "no face in it",
    "mine failed on this sample: KeyError; its log has the reason",
    "the score is 'good', not a number",
    "the score is nan",
    "component other is not among those of Describe: mean",
    1.0,
]


def length(sample: Sample) -> float:
    return float(len(sample.text))


async def test_a_reward_of_texts_gets_the_text() -> None:
    media = ((b"four", "text/plain"), (b"\xff", "text/plain"), (PNG, "image/png"))
    sent = ScoreRequest(
        samples=[
            RewardSample(sample_id=str(place), media=data, media_type=media_type)
            for place, (data, media_type) in enumerate(media)
        ]
    )
    right, broken, picture = shown(await ask(sent, length, modalities=["text"]))
    assert right == 4.0
    assert "not UTF-8" in str(broken)
    assert picture == "media_type 'image/png' is not read here: send text/plain"


async def test_a_text_has_no_frames_and_a_picture_no_text() -> None:
    text = RewardSample(sample_id="0", media=b"four", media_type="text/plain")
    response = await ask(ScoreRequest(samples=[text]), lambda sample: sample.frames.mean(), modalities=["text"])
    assert shown(response) == ["text/plain has no frames here: `text` has an answer, `sound` a sound"]
    response = await ask(request("a"), length)
    assert shown(response) == ["image/png is not a text: `image` and `frames` have its pixels"]


async def test_a_film_and_a_wave_have_a_sound() -> None:
    made = Sound(np.full((1, 1600), 0.25, np.float32), 16_000)
    files = encode_media(np.zeros((5, 4, 6, 3), np.uint8), sound=made), encode_sound(made), (VIDEO, "video/mp4")
    samples = [RewardSample(sample_id=str(n), media=data, media_type=kind) for n, (data, kind) in enumerate(files)]
    response = await ask(
        ScoreRequest(samples=samples), lambda one: round(float(one.sound.mean()), 3), modalities=["sound"]
    )
    assert [score.score for score in response.scores[:2]] == [0.25, 0.25]
    assert "the film has no sound" in response.scores[2].error


@pytest.mark.parametrize("score", [moody, moody_later])
async def test_each_sample_has_an_outcome_of_its_own(score: Callable[..., Any]) -> None:
    response = await ask(request(*MOODS), score, components=("mean",))
    assert shown(response) == OUTCOMES
    assert response.scores[-1].components == {"mean": 51.0}
    assert response.version == "2"


async def test_a_batch_function_gives_scores_and_errors() -> None:
    def score(samples: list[Sample]) -> list[Any]:
        return [ValueError("odd") if sample.prompt == "odd" else len(samples) for sample in samples]

    assert shown(await ask(request("a", "odd", "b"), score, batch=True)) == [3.0, "odd", 3.0]


async def test_a_batch_that_fails_is_asked_sample_by_sample() -> None:
    def score(samples: Sequence[Sample]) -> list[float]:
        return [float(sample.prompt) for sample in samples]

    assert shown(await ask(request("1", "x", "3"), score, batch=True)) == [
        1.0,
        "could not convert string to float: 'x'",
        3.0,
    ]
    short = "mine gave 1 scores for 2 samples"
    assert shown(await ask(request("aa", "ab"), lambda samples: [1.0], batch=True, needs_group=True)) == [short] * 2


async def test_groups_are_seen_whole_whatever_the_order() -> None:
    def rank(samples: list[Sample]) -> list[float]:
        assert len({sample.group_id for sample in samples}) == 1
        return [float(sorted(one.prompt for one in samples).index(sample.prompt)) for sample in samples]

    response = await ask(request("b2", "a3", "b1", "a1", "a2"), rank, batch=True, needs_group=True)
    assert shown(response) == [1.0, 2.0, 0.0, 0.0, 1.0]


class Settings(Params):
    power: float = 1.0
    name: str = "x"


async def test_params_reach_the_function_and_are_checked() -> None:
    assert shown(
        await ask(request("3", power="2"), lambda sample, params: float(sample.prompt) ** params.power, params=Settings)
    ) == [9.0]
    with pytest.raises(grpc.aio.AioRpcError, match=r"params.powr is unknown: this reward takes power, name"):
        await ask(request("3", powr="2"), lambda sample, params: 1.0, params=Settings)
    with pytest.raises(ValueError, match=r"params.power: .*valid number"):
        read_params(Settings, {"power": "much"})
    with pytest.raises(ValueError, match=r"params.x is unknown: this reward takes no parameters"):
        read_params(None, {"x": "1"})


async def test_a_video_is_refused_unless_it_is_scored() -> None:
    sent = request("v")
    sent.samples[0].media, sent.samples[0].media_type = VIDEO, "video/mp4"
    assert "media_type 'video/mp4' is not read here" in str(shown(await ask(sent, lambda sample: 1.0))[0])
    assert shown(await ask(sent, lambda sample: len(sample.frames), modalities=("image", "video"))) == [5.0]


async def test_what_nobody_waits_for_is_not_scored() -> None:
    begun, gate, seen = threading.Event(), threading.Event(), list[str]()

    def slow(sample: Sample) -> float:
        seen.append(sample.prompt)
        begun.set()
        assert gate.wait(30)
        return 1.0

    async with served(slow) as stub:
        first = asyncio.ensure_future(stub.Score(request("first"), timeout=30))
        await asyncio.to_thread(begun.wait, 30)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Score(request("left", "behind"), timeout=0.3)
        for _ in range(3):  # what the service answers now, it answers after it has heard that the caller left
            await stub.Describe(DescribeRequest(), timeout=30)
        gate.set()
        await first
        await stub.Score(request("last"), timeout=30)
    assert seen == ["first", "last"]


async def test_no_more_bytes_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls fit together. A third fits only after they have gone; a call alone always fits."""
    monkeypatch.setattr("flowfleet.rewards.service.MAX_WAITING_BYTES", 2 * len(PNG))
    gone = asyncio.Event()

    async def score(sample: Sample) -> float:
        await gone.wait()
        return 0.5

    async with served(score) as stub:
        calls = [asyncio.ensure_future(stub.Score(request("a"), timeout=30)) for _ in range(3)]
        (refused,), _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        error = refused.exception()
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{2 * len(PNG)} bytes wait" in (error.details() or "")
        gone.set()
        await asyncio.gather(*(call for call in calls if call is not refused))
        assert len((await stub.Score(request("a", "b", "c"), timeout=30)).scores) == 3


def test_numbers_are_finite() -> None:
    numbers: list[Any] = [math.inf, -math.inf, math.nan, None]
    for value in numbers:
        assert answer("a", value, ()).WhichOneof("outcome") == "error"
        assert answer("a", (1.0, {"part": value}), ("part",)).WhichOneof("outcome") == "error"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"version": ""}, "version"),
        ({"score_range": (1.0, 1.0)}, "score_range"),
        ({"modalities": ("smell",)}, "modalities"),
        ({"components": ("a", "a")}, "components"),
        ({"needs_group": True}, "batch"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"threads": 0}, "threads"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"the reward 'mine' cannot be served: give .*{named}"):
        serve(moody, **{"name": "mine", "version": "1", **settings})


async def test_a_function_that_hangs_denies_health_and_one_that_begins_slowly_does_not() -> None:
    """The first call may load a model; a hang is found out while other threads continue."""
    hang_s = 0.2
    pulse, ended = Pulse(hang_s, 600.0), threading.Event()

    def score_sample(sample: Sample) -> float:
        if sample.prompt == "hang":
            ended.wait(30)
        else:
            time.sleep(float(sample.prompt))
        return 1.0

    servicer = RewardServicer(Reward(score=score_sample, name="mine", version="2", threads=2), pulse)
    first = asyncio.create_task(servicer.Score(request(str(3 * hang_s)), None))
    while not first.done():
        assert not pulse.is_stuck
        await asyncio.sleep(0.02)
    pulse.reset()  # so long a call is no measure here
    await servicer.Score(request("0"), None)
    hanging = asyncio.create_task(servicer.Score(request("hang"), None))
    async with asyncio.timeout(20):
        while not pulse.is_stuck:
            await servicer.Score(request("0"), None)
    ended.set()
    await hanging
    assert not pulse.is_stuck
