"""The servicer around an `AsyncScorer` of the test, in this process, over real gRPC; and groups that stay whole."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry

from flowfleet.errors import Unavailable
from flowfleet.proto.reward_pb2 import DescribeRequest, RewardSample, ScoreRequest
from flowfleet.rewards.requests import EncodedSample
from services.reward.execution.batcher import Limits
from services.reward.execution.engines import Direct
from services.reward.execution.groups import together
from services.reward.metrics import RewardMetrics
from services.reward.scorer import AsyncScorer, Outcome, Sample, Score, Scorer
from tests.services.reward.pictures import encoded, sample
from tests.services.reward.serving import served
from tests.waiting import until

if TYPE_CHECKING:
    from flowfleet.proto.reward_pb2_grpc import RewardServiceAsyncStub


class Asking(AsyncScorer[str]):
    """Scores the number that the prompt is; waits for `gate`; keeps what it saw and how its calls ended."""

    def __init__(self) -> None:
        self.name, self.version, self.score_range = "asking", "v8", (-math.inf, math.inf)
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: list[list[EncodedSample]] = []
        self.ended: list[str] = []

    async def start(self) -> None:
        self.ended.append("started")

    async def close(self) -> None:
        self.ended.append("closed")

    def parse(self, params: Mapping[str, str]) -> str:
        return params.get("word", "")

    async def score(self, samples: Sequence[EncodedSample], params: str) -> list[Outcome]:
        self.seen.append(list(samples))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        if params == "down":
            raise Unavailable("settings.url http://x cannot be reached")
        self.ended.append("scored")
        scores: list[Outcome] = [Score(float(sample.prompt)) for sample in samples]
        return scores[params == "forget" :]


class Counting(Scorer[None]):
    """Scores how many samples of its group came along."""

    name, version, score_range, needs_group = "counting", "1", (0.0, math.inf), True

    def __init__(self) -> None:
        self.batches: list[int] = []

    def parse(self, params: Mapping[str, str]) -> None:
        return None

    def score(self, samples: Sequence[Sample], params: None) -> list[Outcome]:
        self.batches.append(len(samples))
        return [Score(sum(other.group_id == one.group_id for other in samples)) for one in samples]


def numbers(*prompts: str) -> list[Any]:
    return [sample(prompt, Image.new("RGB", (4, 4)), prompt) for prompt in prompts]


async def ask(stub: RewardServiceAsyncStub, *prompts: str, timeout_s: float = 60.0, **params: str) -> list[float]:
    response = await stub.Score(ScoreRequest(samples=numbers(*prompts), params=params), timeout=timeout_s)
    assert response.version == "v8"
    return [given.score for given in response.scores]


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"flowfleet_reward_{name}", {"scorer": "asking", **labels})


async def test_calls_go_side_by_side_with_media_as_they_came() -> None:
    scorer = Asking()
    async with served(scorer) as (stub, registry):
        described = await stub.Describe(DescribeRequest(), timeout=60)
        assert (described.name, described.version, described.contract) == ("asking", "v8", 1)
        scorer.gate.clear()
        calls = [asyncio.create_task(ask(stub, str(call), "0.5")) for call in range(20)]
        await until(lambda: len(scorer.seen) == 20)
        scorer.gate.set()
        assert await asyncio.gather(*calls) == [[float(call), 0.5] for call in range(20)]
        assert scorer.seen[0][0].media == encoded(Image.new("RGB", (4, 4)))
    assert scorer.ended == ["started", *["scored"] * 20, "closed"]
    assert value(registry, "samples_total") == 40
    assert value(registry, "batch_size_count") == 20
    assert value(registry, "in_flight_samples") == 0


async def test_a_cancelled_call_and_one_past_its_deadline_cancel_the_scorer() -> None:
    scorer = Asking()
    async with served(scorer) as (stub, _):
        scorer.gate.clear()
        gone = asyncio.create_task(ask(stub, "1"))
        await until(lambda: scorer.seen)
        gone.cancel()
        await until(lambda: scorer.ended.count("cancelled") == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(stub, "2", timeout_s=2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: scorer.ended.count("cancelled") == len(scorer.seen))
        scorer.gate.set()
        assert await ask(stub, "3") == [3.0]


TWO_BYTES = sum(EncodedSample.of(sample).num_bytes for sample in numbers("1", "2"))


@pytest.mark.parametrize("limits", [Limits(max_queued=3), Limits(max_queued_bytes=2 * TWO_BYTES - 1)])
async def test_more_than_fits_is_resource_exhausted(limits: Limits) -> None:
    scorer = Asking()
    async with served(scorer, limits) as (stub, _):
        scorer.gate.clear()
        running = asyncio.create_task(ask(stub, "1", "2"))
        await until(lambda: scorer.seen)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(stub, "3", "4")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        scorer.gate.set()
        assert await running == [1.0, 2.0]
        assert await ask(stub, "3", "4") == [3.0, 4.0]


async def test_bad_headers_and_bad_numbers_cost_their_samples_alone() -> None:
    scorer = Asking()
    async with served(scorer) as (stub, registry):
        junk = RewardSample(sample_id="junk", media=b"junk", media_type="image/png", prompt="1")
        video = RewardSample(sample_id="video", media=b"x", media_type="video/mp4", prompt="1")
        request = ScoreRequest(samples=[junk, *numbers("0.5", "nan"), video])
        response = await stub.Score(request, timeout=60)
        assert [given.WhichOneof("outcome") for given in response.scores] == ["error", "score", "error", "error"]
        assert response.scores[2].error == "the score is nan"
        assert [one.prompt for one in scorer.seen[0]] == ["0.5", "nan"]
        only = await stub.Score(ScoreRequest(samples=[junk]), timeout=60)
        assert only.scores[0].error.startswith("the 4 bytes of media are not a whole image/png")
        assert len(scorer.seen) == 1
    assert value(registry, "errors_total", reason="undecodable") == 2
    assert value(registry, "errors_total", reason="non_finite") == 1
    assert value(registry, "errors_total", reason="media_type") == 1


async def test_a_server_behind_that_is_down_is_unavailable_in_its_own_words() -> None:
    async with served(Asking()) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(stub, "1", word="down")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "settings.url http://x cannot be reached"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(stub, "1", "2", word="forget")
        assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_a_drain_waits_for_what_is_under_way_and_admits_nothing_more() -> None:
    scorer = Asking()
    engine = Direct(scorer, Limits(), RewardMetrics("asking", (0.0, 1.0), CollectorRegistry()))
    scorer.gate.clear()
    running = asyncio.create_task(engine.score(numbers("1"), "", 100))
    await until(lambda: scorer.seen)
    drain = asyncio.create_task(engine.drain())
    await asyncio.sleep(0.05)
    assert not drain.done()
    with pytest.raises(Unavailable, match="draining"):
        await engine.score(numbers("2"), "", 100)
    scorer.gate.set()
    assert await running == [Score(1.0)]
    await drain
    assert scorer.ended == ["scored", "closed"]


async def test_groups_of_a_call_stay_whole_and_share_no_batch_with_another_call() -> None:
    scorer = Counting()
    async with served(scorer, Limits(max_wait_s=0.2)) as (stub, _):
        assert (await stub.Describe(DescribeRequest(), timeout=60)).needs_group
        samples = numbers(*"abcdefg")
        for one, group in zip(samples, "xyxyxzz", strict=True):
            one.group_id = group
        requests = [ScoreRequest(samples=samples), ScoreRequest(samples=samples[:2])]
        first, second = await asyncio.gather(*(stub.Score(request, timeout=60) for request in requests))
        assert [given.sample_id for given in first.scores] == list("abcdefg")
        assert [given.score for given in first.scores] == [3, 2, 3, 2, 3, 2, 2]
        assert [given.score for given in second.scores] == [1, 1]
    assert sorted(scorer.batches) == [2, 7]


def test_groups_are_put_together_by_their_first_sample() -> None:
    samples = [RewardSample(group_id=group) for group in "babcab"]
    assert together(samples) == [0, 2, 5, 1, 4, 3]
