"""Calls of `ScoreWithGradient` from a thread that computes: they run on an event loop elsewhere.

Calls go to the addresses in turn, to the next one where one is unreachable or full, and in halves where they are too
large. What goes wrong becomes an error that leaves the trainer unharmed: RewardUnavailable where the controller is to
send the step again, RewardRefused where somebody must change something first.
"""

import asyncio
import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from flowfleet.errors import FlowfleetError
from flowfleet.process.service import secret
from flowfleet.proto import reward_pb2, reward_pb2_grpc
from flowfleet.proto.trainer_pb2 import GradientReward
from flowfleet.rewards import failures
from flowfleet.rewards.failures import RewardRefused, RewardUnavailable, is_too_large
from flowfleet.rewards.gradients import MAX_GRADIENT_BYTES, PixelInput, Pixels, cut, read_gradient
from flowfleet.rewards.requests import MAX_SCORE
from flowfleet.rpc.endpoint import open_channel
from flowfleet.rpc.kinds import REWARD_TOKEN

DESCRIBE_DEADLINE_S: Final = 10.0
DESCRIBED_FOR_S: Final = 60.0
CALLS_AT_ONCE: Final = 4
"""Calls of one rank that a reward has at once: one is computed while others travel."""
BEAT_S: Final = 1.0

_CODE = grpc.StatusCode
_ANOTHER_MAY = (_CODE.UNAVAILABLE, _CODE.RESOURCE_EXHAUSTED)
"""Another replica may answer: this one is unreachable, or its queue is full."""

T = TypeVar("T")


@dataclass(frozen=True)
class Scored:
    """A reward's answer for one sample."""

    score: float
    gradient: Pixels
    """(3, height, width)"""


class GradientClient:
    """Belongs to one thread at a time."""

    def __init__(
        self, deadline_s: float, beat: Callable[[], None], loop: asyncio.AbstractEventLoop | None, rank: int = 0
    ) -> None:
        """`deadline_s`: of each call. `beat` is called while calls run. Without a `loop` it makes one, in a thread.
        Calls go to the replicas in turn, and another rank begins at another."""
        self._turn = itertools.count(rank)
        self._deadline_s, self._beat = deadline_s, beat
        self._loop = loop or loop_in_a_thread("rewards")
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._described: dict[str, tuple[reward_pb2.DescribeResponse, float]] = {}

    def ask(self, reward: GradientReward, samples: Sequence[PixelInput]) -> dict[str, Scored | str]:
        """Asks one reward. By sample id: its answer, or why there is none. Raises RewardUnavailable or
        RewardRefused."""
        return self._run(self._ask(reward, samples))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            done, _ = concurrent.futures.wait([future], BEAT_S)
            if done:
                return future.result()
            self._beat()

    async def _ask(self, reward: GradientReward, samples: Sequence[PixelInput]) -> dict[str, Scored | str]:
        if not reward.addresses:
            raise RewardUnavailable(
                f"{failures.at(reward.name, reward.service)} has no replica that is ready", reward.name
            )
        described = await self._any_description(reward)
        limit = described.gradient_bytes or MAX_GRADIENT_BYTES
        calls = cut(samples, described.max_batch_size or len(samples), min(limit, MAX_GRADIENT_BYTES))
        turns = asyncio.Semaphore(CALLS_AT_ONCE)

        async def one(call: Sequence[PixelInput]) -> dict[str, Scored | str]:
            async with turns:
                return await self._call(reward, call)

        tasks = [asyncio.ensure_future(one(call)) for call in calls]
        try:
            answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return {sample_id: answer for part in answers for sample_id, answer in part.items()}

    async def _any_description(self, reward: GradientReward) -> reward_pb2.DescribeResponse:
        """Description of the first replica that answers; replicas of a service are alike."""
        failure: FlowfleetError | None = None
        for address in reward.addresses:
            known, at = self._described.get(address, (None, 0.0))
            if known is not None and time.monotonic() - at < DESCRIBED_FOR_S:
                return known
            stub: reward_pb2_grpc.RewardServiceAsyncStub = reward_pb2_grpc.RewardServiceStub(self._channel(address))
            try:
                described = await stub.Describe(reward_pb2.DescribeRequest(), timeout=DESCRIBE_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                failure = _failure(reward, address, error, None)
                continue
            problem = failures.newer_contract(reward.name, reward.service, described, "trainer")
            if problem := problem or failures.without_gradient(reward.name, reward.service, described):
                raise RewardRefused(problem, reward.name)
            self._described[address] = described, time.monotonic()
            return described
        assert failure is not None
        raise failure

    async def _call(self, reward: GradientReward, samples: Sequence[PixelInput]) -> dict[str, Scored | str]:
        request = reward_pb2.ScoreWithGradientRequest(
            samples=[sample.message() for sample in samples], params=dict(reward.params)
        )
        failure: FlowfleetError | None = None
        first = next(self._turn) % len(reward.addresses)
        for address in (*reward.addresses[first:], *reward.addresses[:first]):
            stub: reward_pb2_grpc.RewardServiceAsyncStub = reward_pb2_grpc.RewardServiceStub(self._channel(address))
            try:
                response = await stub.ScoreWithGradient(request, timeout=self._deadline_s)
            except grpc.aio.AioRpcError as error:
                if is_too_large(error) and len(samples) > 1:
                    middle = len(samples) // 2
                    return {**await self._call(reward, samples[:middle]), **await self._call(reward, samples[middle:])}
                self._described.pop(address, None)
                failure = _failure(reward, address, error, self._deadline_s)
                if error.code() not in _ANOTHER_MAY:
                    break
                continue
            return _answers(samples, response)
        assert failure is not None
        raise failure

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address, token=secret(REWARD_TOKEN))
        return self._channels[address]


def _failure(
    reward: GradientReward, address: str, error: grpc.aio.AioRpcError, deadline_s: float | None
) -> FlowfleetError:
    message = failures.of_call(reward.name, reward.service, address, error, deadline_s, "trainer")
    is_permanent = error.code() in failures.PERMANENT and not failures.may_heal(error)
    kind = RewardRefused if is_permanent or is_too_large(error) else RewardUnavailable
    return kind(message, reward.name)


def _answers(samples: Sequence[PixelInput], response: reward_pb2.ScoreWithGradientResponse) -> dict[str, Scored | str]:
    given = {score.sample_id: score for score in response.scores}
    answers: dict[str, Scored | str] = {}
    for sample in samples:
        if (score := given.get(sample.sample_id)) is None:
            answers[sample.sample_id] = "it is missing in the answer"
        elif score.WhichOneof("outcome") != "score":
            answers[sample.sample_id] = score.error or "it has neither score nor error"
        else:
            try:
                if not abs(score.score) <= MAX_SCORE:
                    raise ValueError(f"its score is {score.score}")
                answers[sample.sample_id] = Scored(score.score, read_gradient(score.gradient, sample.pixels.shape))
            except ValueError as error:
                answers[sample.sample_id] = str(error)
    return answers


def loop_in_a_thread(name: str) -> asyncio.AbstractEventLoop:
    """Starts an event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop
