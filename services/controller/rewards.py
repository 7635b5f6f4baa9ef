"""Asks the reward services of a job and joins their answers: one finite weighted sum a sample, or the reason why
there is none. Which replicas there are, the directory tells at each call."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import grpc
from prometheus_client import CollectorRegistry

from flowfleet.jobs import JobSpec, RewardPart
from flowfleet.proto import reward_pb2, reward_pb2_grpc
from flowfleet.rpc import MAX_MESSAGE_BYTES, open_channel
from services.controller.concurrency import gather_or_cancel
from services.controller.credit import PREFERENCE
from services.controller.directory import Directory
from services.controller.reward_calls import RewardCalls
from services.controller.waiting import NotYet

log = logging.getLogger(__name__)

DESCRIBE_DEADLINE_S = 10.0
AVOID_S = 5.0
"""A replica whose call broke is asked last for so long: before the directory knows that it is gone."""
MAX_CALL_BYTES = MAX_MESSAGE_BYTES // 2
"""Of the samples of one call: well below what a message may have."""

_AWAY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED})
_KIND = {reward_pb2.MODALITY_IMAGE: "pictures", reward_pb2.MODALITY_VIDEO: "videos"}


@dataclass(frozen=True)
class Verdict:
    """What the rewards said of one sample. `reason` is set where `score` is not."""

    score: float | None
    reason: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    """Reward → score, and reward.component → value."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Reward → score alone."""


def preference(index: int) -> Verdict:
    """Of a sample of a preference data set, by definition: 1 for what was chosen (0), 0 for what was rejected (1)."""
    scores = {PREFERENCE: 1.0 - index}
    return Verdict(1.0 - index, "", scores, scores)


def modality_of(spec: JobSpec) -> reward_pb2.Modality.ValueType:
    """What the rewards of a job must be able to score."""
    return reward_pb2.MODALITY_VIDEO if spec.rollout.num_frames > 1 else reward_pb2.MODALITY_IMAGE


@dataclass
class _Replica:
    channel: grpc.aio.Channel
    outstanding: int = 0
    """Calls that are away."""
    broke_at: float = float("-inf")
    described: reward_pb2.DescribeResponse | None = None

    @property
    def stub(self) -> reward_pb2_grpc.RewardServiceAsyncStub:
        return reward_pb2_grpc.RewardServiceStub(self.channel)

    @property
    def rank(self) -> tuple[bool, int]:
        """Ascending: the one to ask first."""
        return time.monotonic() - self.broke_at < AVOID_S, self.outstanding

    async def describe(self) -> reward_pb2.DescribeResponse:
        """Asked once."""
        if self.described is None:
            with self.noting_breaks():
                request = reward_pb2.DescribeRequest()
                self.described = await self.stub.Describe(request, timeout=DESCRIBE_DEADLINE_S)
        return self.described

    @contextmanager
    def noting_breaks(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() in _AWAY:
                self.broke_at = time.monotonic()
            raise


class _Service:
    """A reward of the job: a channel to each replica that is ready, or still has calls."""

    def __init__(self, name: str, part: RewardPart, directory: Directory) -> None:
        self.name = name
        self.part = part
        self._directory = directory
        self._replicas: dict[str, _Replica] = {}

    @property
    def missing(self) -> str:
        """Why it cannot be asked now; "" where it can."""
        rewards = self._directory.rewards
        if self.name not in rewards:
            known = ", ".join(sorted(rewards)) or "none"
            return f"reward {self.name!r} is gone; there are: {known}"
        if rewards[self.name]:
            return ""
        shortage = self._directory.shortage("reward", self.name)
        return f"reward {self.name!r} has no replica that is ready" + (f": {shortage}" if shortage else "")

    async def ready(self) -> list[_Replica]:
        """Raises NotYet when there is none."""
        addresses = self._directory.rewards.get(self.name, ())
        if not addresses:
            raise NotYet(self.missing)
        await self._close(address for address in list(self._replicas) if address not in addresses)
        for address in addresses:
            if address not in self._replicas:
                self._replicas[address] = _Replica(open_channel(address))
        return [self._replicas[address] for address in addresses]

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[_Replica]:
        """The ready replica with the fewest calls, one more."""
        replica = min(await self.ready(), key=lambda replica: replica.rank)
        replica.outstanding += 1
        try:
            with replica.noting_breaks():
                yield replica
        finally:
            replica.outstanding -= 1

    async def descriptions(self) -> list[reward_pb2.DescribeResponse]:
        """Of the replicas that answer; raises what one of them raised where none does. Of different versions there may
        be some at once, while they are replaced."""
        ready = await self.ready()
        asked = [replica for replica in ready if not replica.rank[0]] or ready
        answers = await asyncio.gather(*(replica.describe() for replica in asked), return_exceptions=True)
        given = [answer for answer in answers if isinstance(answer, reward_pb2.DescribeResponse)]
        for answer in answers:
            if isinstance(answer, BaseException) and not (given and isinstance(answer, grpc.aio.AioRpcError)):
                raise answer
        return given

    async def close(self) -> None:
        await asyncio.gather(*(replica.channel.close(None) for replica in self._replicas.values()))

    async def _close(self, addresses: Iterator[str]) -> None:
        """Of those that are gone; calls that are away have their time to end."""
        idle = [self._replicas.pop(address) for address in addresses if not self._replicas[address].outstanding]
        await asyncio.gather(*(replica.channel.close(None) for replica in idle))


class RewardPlane:
    """The rewards of one job."""

    def __init__(
        self,
        parts: Mapping[str, RewardPart],
        directory: Directory,
        deadline_s: float,
        modality: reward_pb2.Modality.ValueType = reward_pb2.MODALITY_IMAGE,
        calls: RewardCalls | None = None,
    ) -> None:
        self._deadline_s = deadline_s
        self._calls = calls or RewardCalls(CollectorRegistry())
        self._modality = modality
        self._services = [_Service(name, part, directory) for name, part in sorted(parts.items())]

    async def close(self) -> None:
        await asyncio.gather(*(service.close() for service in self._services))

    async def score(self, samples: Sequence[reward_pb2.RewardSample]) -> dict[str, Verdict]:
        """Verdicts by sample id, one for each sample; those of a group stand together. Raises NotYet while a reward has
        no replica, grpc.aio.AioRpcError when a service fails as a whole, ValueError for one that cannot score them."""
        if missing := [service.missing for service in self._services if service.missing]:
            raise NotYet("; ".join(missing))
        answers = await gather_or_cancel(self._ask(service, samples) for service in self._services)
        return {sample.sample_id: self._join(sample.sample_id, answers) for sample in samples}

    async def _ask(
        self, service: _Service, samples: Sequence[reward_pb2.RewardSample]
    ) -> dict[str, reward_pb2.RewardScore]:
        described = await service.descriptions()
        self._check_modality(service, described)
        limit = min(one.max_batch_size or len(samples) for one in described)
        cut = whole_groups if any(one.needs_group for one in described) else chunks
        try:
            calls = list(cut(samples, limit))
        except ValueError as error:
            raise ValueError(f"rewards.{service.name} {error}") from None
        requests = [reward_pb2.ScoreRequest(samples=part, params=service.part.params) for part in calls]
        responses = await gather_or_cancel(self._call(service, request) for request in requests)
        return {score.sample_id: score for response in responses for score in response.scores}

    async def _call(self, service: _Service, request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        async with service.lease() as replica:
            with self._calls.call(service.name):
                return await replica.stub.Score(request, timeout=self._deadline_s)

    def _check_modality(self, service: _Service, described: Sequence[reward_pb2.DescribeResponse]) -> None:
        """Raises ValueError for a reward that cannot score what the job makes."""
        for one in described:
            if self._modality not in (one.modalities or [reward_pb2.MODALITY_IMAGE]):
                raise ValueError(
                    f"rewards.{service.name} does not score {_KIND[self._modality]}: leave it out of this job"
                )

    def _join(self, sample_id: str, answers: Sequence[Mapping[str, reward_pb2.RewardScore]]) -> Verdict:
        total = 0.0
        scores: dict[str, float] = {}
        rewards: dict[str, float] = {}
        for service, by_id in zip(self._services, answers, strict=True):
            problem, answer = _problem(by_id.get(sample_id))
            if answer is None:
                log.warning("%s gave no score: %s", service.name, problem, extra={"sample": sample_id})
                return Verdict(None, f"no_score_{service.name}", scores)
            total += service.part.weight * answer.score
            scores[service.name] = rewards[service.name] = answer.score
            scores.update({f"{service.name}.{name}": value for name, value in answer.components.items()})
        if not math.isfinite(total):
            return Verdict(None, "non_finite_sum", scores)
        return Verdict(total, "", scores, rewards)


def _problem(answer: reward_pb2.RewardScore | None) -> tuple[str, reward_pb2.RewardScore | None]:
    if answer is None:
        return "it is missing in the response", None
    if answer.WhichOneof("outcome") != "score":
        return answer.error or "neither score nor error", None
    if not math.isfinite(answer.score):
        return f"the score is {answer.score}", None
    return "", answer


def chunks(
    samples: Sequence[reward_pb2.RewardSample], max_samples: int, max_bytes: int = MAX_CALL_BYTES
) -> Iterator[list[reward_pb2.RewardSample]]:
    """Cuts samples, in order, into calls within both limits; a sample over `max_bytes` gets a call of its own."""
    call: list[reward_pb2.RewardSample] = []
    size = 0
    for sample in samples:
        if call and (len(call) == max_samples or size + sample.ByteSize() > max_bytes):
            yield call
            call, size = [], 0
        call.append(sample)
        size += sample.ByteSize()
    if call:
        yield call


def whole_groups(
    samples: Sequence[reward_pb2.RewardSample], max_samples: int, max_bytes: int = MAX_CALL_BYTES
) -> Iterator[list[reward_pb2.RewardSample]]:
    """One call a group; the samples of a group stand together. Raises ValueError for a group beyond a limit."""
    for _, members in itertools.groupby(samples, key=lambda sample: sample.group_id):
        group = list(members)
        size = sum(sample.ByteSize() for sample in group)
        if len(group) > max_samples:
            raise ValueError(f"scores whole groups of at most {max_samples} samples: lower rollout.group_size")
        if len(group) > 1 and size > max_bytes:
            raise ValueError(
                f"scores whole groups, and one of {size} bytes is over the {max_bytes} of a call: lower "
                "rollout.group_size or the size of the samples"
            )
        yield group
