"""Client of one reward service: has a channel to each replica that is ready or still has calls, and chooses among them.

It fills one replica before it asks the next, so that replicas that are not needed may go. A replica whose call broke is
asked last for a while.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc

from flowfleet.process.service import secret
from flowfleet.proto import reward_pb2, reward_pb2_grpc
from flowfleet.rewards.failures import is_too_large, newer_contract, without_gradient
from flowfleet.rewards.requests import EncodedSample, ScoreCall, score_method
from flowfleet.rpc.endpoint import open_channel
from flowfleet.rpc.kinds import REWARD_TOKEN
from services.controller.concurrency import end, gather_or_cancel
from services.controller.fleet.directory import Directory
from services.controller.rewards.answers import Answer, is_rubbish, read_answers
from services.controller.rewards.chunking import MAX_CALL_BYTES, chunks, whole_groups
from services.controller.rewards.failures import RewardFailure, of_call
from services.controller.rewards.metrics import RewardCalls

DESCRIBE_DEADLINE_S = 10.0
TOGETHER_S = 0.5
"""Replicas that answer Describe so soon after it was sent are asked for scores at once; others when they have."""
DESCRIBED_FOR_S = 60.0
"""A description is asked for again after so long, and after each break of the connection: another process may have the
address by then."""
AVOID_S = 5.0
"""A replica whose call broke is asked last for so long: before the directory knows that it is gone."""
REPLICA_SAMPLES = 32
"""Samples that fill a replica, or two of its largest calls where those are fewer: one is scored, the next waits."""

_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_KIND = {
    reward_pb2.MODALITY_IMAGE: "pictures",
    reward_pb2.MODALITY_VIDEO: "videos",
    reward_pb2.MODALITY_TEXT: "texts",
    reward_pb2.MODALITY_SOUND: "videos",
}

Samples = Sequence[EncodedSample]


@dataclass
class _Replica:
    address: str
    channel: grpc.aio.Channel
    outstanding: int = 0
    """Samples that are being scored."""
    broke_at: float = float("-inf")
    described: reward_pb2.DescribeResponse | None = None
    described_at: float = float("-inf")
    version: str = ""
    """Version in the last answer."""
    call: asyncio.Task[reward_pb2.DescribeResponse] | None = None
    """The last Describe."""
    called_at: float = float("-inf")

    async def score(self, call: bytes, deadline_s: float) -> reward_pb2.ScoreResponse:
        return await score_method(self.channel)(call, timeout=deadline_s)

    @property
    def broken(self) -> bool:
        return time.monotonic() - self.broke_at < AVOID_S

    def has_room(self, count: int) -> bool:
        batch = self.described.max_batch_size if self.described else 0
        return self.outstanding + count <= max(count, min(2 * batch or REPLICA_SAMPLES, REPLICA_SAMPLES))

    async def describe(self) -> reward_pb2.DescribeResponse:
        """Asked once a connection, and now and then; several that wait share one call."""
        return await asyncio.shield(self.describing())

    def describing(self) -> asyncio.Task[reward_pb2.DescribeResponse]:
        if self.call is None or (self.call.done() and not self._is_fresh):
            self.called_at = time.monotonic()
            self.call = asyncio.create_task(self._describe())
            self.call.add_done_callback(lambda call: call.cancelled() or call.exception())  # the caller may be gone
        return self.call

    @property
    def _is_fresh(self) -> bool:
        age = time.monotonic() - self.described_at
        is_connected = self.channel.get_state() is grpc.ChannelConnectivity.READY
        return self.described is not None and is_connected and age <= DESCRIBED_FOR_S

    async def _describe(self) -> reward_pb2.DescribeResponse:
        with self.noting_breaks():
            stub = reward_pb2_grpc.RewardServiceStub(self.channel)
            answer = await stub.Describe(reward_pb2.DescribeRequest(), timeout=DESCRIBE_DEADLINE_S)
        self.described, self.described_at = answer, time.monotonic()
        return answer

    async def close(self) -> None:
        if self.call is not None:
            await end([self.call])
        await self.channel.close(None)

    async def describe_what_answered(self, response: reward_pb2.ScoreResponse | None) -> reward_pb2.DescribeResponse:
        """Asked again where the answer comes from a version that was not seen before."""
        version = response.version if response is not None else ""
        if self.described is not None and version not in ("", self.described.version, self.version):
            self.described = None
        self.version = version
        return await self.describe()

    @contextmanager
    def noting_breaks(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() in _AWAY:
                self.broke_at = time.monotonic()
            self.described = None
            raise


class RewardService:
    """A service by its name in the directory."""

    def __init__(self, service: str, directory: Directory, deadline_s: float, calls: RewardCalls) -> None:
        self.service = service
        self._directory = directory
        self._deadline_s = deadline_s
        self._calls = calls
        self._replicas: dict[str, _Replica] = {}
        self._max_bytes = MAX_CALL_BYTES
        self.needs_group = False
        """True where it scores whole groups only, as far as it is known."""

    async def ask(
        self, name: str, params: Mapping[str, str], samples: Samples, modality: reward_pb2.Modality.ValueType
    ) -> dict[str, Answer]:
        """Answers by sample id, one for each sample. Raises RewardFailure, which speaks of the reward `name`."""
        answered = await self._descriptions(name)
        described = [*answered.values()]
        self._check(name, described, modality)
        limit = min(one.max_batch_size or len(samples) for one in described)
        needs_group = self.needs_group = any(one.needs_group for one in described)
        try:
            wished = min((one.call_bytes for one in described if one.call_bytes), default=0)
            cut = whole_groups(samples, limit) if needs_group else chunks(samples, limit, self._max_bytes, wished)
            calls = list(cut)
        except ValueError as error:
            raise RewardFailure(f"rewards.{name} {error}", permanent=True) from None
        parts = await gather_or_cancel(
            self._score(name, params, call, answered, may_split=not needs_group) for call in calls
        )
        answers = {sample_id: answer for part in parts for sample_id, answer in part.items()}
        if is_rubbish(list(answers.values())):
            problem = next(iter(answers.values())).problem
            raise RewardFailure(
                f"rewards.{name}: service {self.service!r} gave no usable answer, for "
                f"example: {problem}; repair the service (`flowfleet check-reward ADDRESS` shows what is wrong)"
            )
        return answers

    async def check(self, name: str, modality: reward_pb2.Modality.ValueType, *, needs_gradient: bool = False) -> None:
        """Raises RewardFailure where the service does not answer, cannot score what a job makes, or gives no
        gradient where the job trains on it."""
        described = [*(await self._descriptions(name)).values()]
        self.needs_group = any(one.needs_group for one in described)
        self._check(name, described, modality)
        problems = [without_gradient(name, self.service, one) for one in described]
        if needs_gradient and (problem := next(filter(None, problems), "")):
            raise RewardFailure(problem, permanent=True)

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))

    # -- which replica -----------------------------------------------------------------------------------------------

    async def _ready(self, name: str) -> list[_Replica]:
        """In the directory's order. Raises RewardFailure when there is none."""
        addresses = self._directory.rewards.get(self.service, ())
        if not addresses:
            raise RewardFailure(f"rewards.{name}: {self._missing}")
        await self._close(address for address in list(self._replicas) if address not in addresses)
        for address in addresses:
            if address not in self._replicas:
                self._replicas[address] = _Replica(address, open_channel(address, token=secret(REWARD_TOKEN)))
        return [self._replicas[address] for address in addresses]

    @property
    def _missing(self) -> str:
        rewards = self._directory.rewards
        if self.service not in rewards:
            return f"reward service {self.service!r} is gone; there are: {', '.join(sorted(rewards)) or 'none'}"
        shortage = self._directory.shortage("reward", self.service)
        return f"reward service {self.service!r} has no replica that is ready" + (f": {shortage}" if shortage else "")

    @asynccontextmanager
    async def _lease(self, replica: _Replica, count: int) -> AsyncIterator[None]:
        replica.outstanding += count
        try:
            with replica.noting_breaks(), self._calls.call(self.service):
                yield
        finally:
            replica.outstanding -= count

    @staticmethod
    def _choose(ready: Sequence[_Replica], count: int) -> _Replica:
        """The first that has room; else the one with the fewest samples. Broken ones last, the first broken first."""
        sound = [replica for replica in ready if not replica.broken]
        if not sound:
            return min(ready, key=lambda replica: replica.broke_at)
        return next(
            (replica for replica in sound if replica.has_room(count)), min(sound, key=lambda one: one.outstanding)
        )

    async def _close(self, addresses: Iterator[str]) -> None:
        """Closes channels to replicas that are gone; running calls have their time to end."""
        idle = [self._replicas.pop(address) for address in addresses if not self._replicas[address].outstanding]
        await asyncio.gather(*(replica.close() for replica in idle))

    # -- calls -------------------------------------------------------------------------------------------------------

    async def _descriptions(self, name: str) -> dict[str, reward_pb2.DescribeResponse]:
        """Descriptions by the replicas that answer, by address. Raises RewardFailure if none answers. Versions may
        differ during a rolling replacement."""
        ready = await self._ready(name)
        asked = [replica for replica in ready if not replica.broken] or ready
        calls = [replica.describing() for replica in asked]
        await _first_answers(calls, max(replica.called_at for replica in asked) + TOGETHER_S)
        answers = {
            replica.address: call.result() for replica, call in zip(asked, calls, strict=True) if _went_well(call)
        }
        if not answers:
            for replica, call in zip(asked, calls, strict=True):
                if not isinstance(error := call.exception(), grpc.aio.AioRpcError):
                    raise error or RuntimeError("a call has neither answer nor error")
                raise of_call(name, self.service, replica.address, error, None)
        if not all(isinstance(answer, reward_pb2.DescribeResponse) for answer in answers.values()):
            raise self._not_understood(name, asked[0])
        return answers

    def _check(
        self,
        name: str,
        described: Sequence[reward_pb2.DescribeResponse],
        modality: reward_pb2.Modality.ValueType,
    ) -> None:
        """Raises RewardFailure for a reward that speaks a newer contract, or cannot score what the job makes."""
        for one in described:
            if problem := newer_contract(name, self.service, one, "controller"):
                raise RewardFailure(problem, permanent=True)
            taken = set(one.modalities or [reward_pb2.MODALITY_IMAGE])
            if modality == reward_pb2.MODALITY_VIDEO and taken == {reward_pb2.MODALITY_SOUND}:
                raise RewardFailure(
                    f"rewards.{name} scores sound, and the films of this job's model are silent: leave it out, or "
                    "choose a model that makes films with sound",
                    permanent=True,
                )
            if modality == reward_pb2.MODALITY_SOUND and reward_pb2.MODALITY_VIDEO in taken:
                continue
            if modality not in taken:
                raise RewardFailure(
                    f"rewards.{name} does not score {_KIND[modality]}: leave it out of this job", permanent=True
                )

    async def _score(
        self, name: str, params: Mapping[str, str], samples: Samples, suited: Container[str], *, may_split: bool
    ) -> dict[str, Answer]:
        """Calls a replica that suits the samples; tries others while it finds replicas gone, and halves while the call
        is too large."""
        call = ScoreCall(samples, params)
        written = call.write()
        tried: list[str] = []
        while True:
            every = await self._ready(name)
            ready = [one for one in every if one.address in suited] or every
            replica = self._choose([one for one in ready if one.address not in tried] or ready, len(samples))
            tried.append(replica.address)
            start = time.monotonic()
            try:
                async with self._lease(replica, len(samples)):
                    response = await replica.score(written, self._deadline_s)
                    seconds = time.monotonic() - start
                    described = await replica.describe_what_answered(response)
            except grpc.aio.AioRpcError as error:
                if is_too_large(error) and may_split and len(samples) > 1:
                    return await self._in_halves(name, params, samples, suited, call.num_bytes)
                is_gone = error.code() is grpc.StatusCode.UNAVAILABLE
                if is_gone and any(not one.broken and one.address not in tried for one in ready):
                    continue
                raise of_call(name, self.service, replica.address, error, self._deadline_s) from None
            if not isinstance(response, reward_pb2.ScoreResponse):
                raise self._not_understood(name, replica)
            return read_answers(samples, response, described, seconds)

    async def _in_halves(
        self, name: str, params: Mapping[str, str], samples: Samples, suited: Container[str], size_bytes: int
    ) -> dict[str, Answer]:
        """And later calls no larger than these."""
        self._max_bytes = min(self._max_bytes, max(1, size_bytes // 2))
        middle = len(samples) // 2
        halves = (samples[:middle], samples[middle:])
        first, second = await gather_or_cancel(
            self._score(name, params, half, suited, may_split=True) for half in halves
        )
        return first | second

    def _not_understood(self, name: str, replica: _Replica) -> RewardFailure:
        return RewardFailure(
            f"rewards.{name}: service {self.service!r} at {replica.address} answers, but not with messages of "
            "flowfleet.v1.RewardService: make it from protos/flowfleet/v1/reward.proto"
        )


async def _first_answers(calls: Sequence[asyncio.Task[reward_pb2.DescribeResponse]], together_until: float) -> None:
    """Waits until all calls end, or one succeeds after the monotonic time `together_until`: a hanging replica delays
    only calls without an alternative."""
    while left := [call for call in calls if not call.done()]:
        is_answered = any(map(_went_well, calls))
        seconds = together_until - time.monotonic()
        if is_answered and seconds <= 0:
            return
        await asyncio.wait(left, timeout=seconds if is_answered else None, return_when=asyncio.FIRST_COMPLETED)


def _went_well(call: asyncio.Task[reward_pb2.DescribeResponse]) -> bool:
    return call.done() and not call.cancelled() and call.exception() is None
