"""Asks a reward service for scores, in calls as a controller makes them, and compares them with earlier ones."""

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc
import numpy as np

from flowfleet.conformance.session import Options, open_channel
from flowfleet.proto.reward_pb2 import DescribeRequest, DescribeResponse, RewardScore
from flowfleet.proto.reward_pb2_grpc import RewardServiceStub
from flowfleet.ranks import ranks
from flowfleet.rewards.requests import EncodedSample, ScoreCall, score_method
from flowfleet.rpc.endpoint import rpc_error_message

CALL_SAMPLES: Final = 16
"""Samples per call, unless the service asks for fewer or for whole groups."""


@dataclass(frozen=True)
class Tried:
    """Outcome of one sample. It has either a `score` or an `error`."""

    sample: str
    """Name of the file, or step/group/index."""
    score: float | None
    error: str = ""
    components: Mapping[str, float] = field(default_factory=dict)
    stored: float | None = None
    """Score that the job has for the sample."""

    @property
    def difference(self) -> float | None:
        return None if self.score is None or self.stored is None else self.score - self.stored


@dataclass(frozen=True)
class Trial:
    service: str
    """Name and version."""
    samples: Sequence[Tried]
    mean: float | None
    stored_mean: float | None
    """Both means are over the samples that have both scores, where any was stored."""
    largest_difference: float | None
    rank_correlation: float | None
    """Spearman's; None with fewer than two samples, or where one of both gives all the same score."""


def try_reward(
    address: str,
    samples: Sequence[EncodedSample],
    params: Mapping[str, str],
    timeout_s: float,
    stored: Mapping[str, float | None],
) -> Trial:
    """Scores samples, and compares them by sample id with the `stored` scores.

    Raises ValueError where the service cannot be asked, or rejects a call, with its reason."""
    try:
        described, scores = asyncio.run(_ask(address, samples, params, timeout_s))
    except grpc.aio.AioRpcError as error:
        raise ValueError(f"{address}: {rpc_error_message(error)}") from None
    return compared(described, [_tried(scores.get(sample.sample_id), sample.sample_id, stored) for sample in samples])


def compared(service: str, tried: Sequence[Tried]) -> Trial:
    """Sums up. Pure."""
    both = [(sample.score, sample.stored) for sample in tried if sample.score is not None and sample.stored is not None]
    new, old = (np.array([pair[side] for pair in both], np.float64) for side in (0, 1))
    scores = [sample.score for sample in tried if sample.score is not None]
    mean = float(new.mean()) if both else float(np.mean(scores)) if scores else None
    return Trial(
        service=service,
        samples=tried,
        mean=mean,
        stored_mean=float(old.mean()) if both else None,
        largest_difference=float(np.abs(new - old).max()) if both else None,
        rank_correlation=float(np.corrcoef(ranks(new), ranks(old))[0, 1]) if _differ(new) and _differ(old) else None,
    )


def _differ(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> bool:
    return len(values) > 1 and bool(values.min() < values.max())


def _tried(score: RewardScore | None, name: str, stored: Mapping[str, float | None]) -> Tried:
    if score is None or score.WhichOneof("outcome") != "score":
        error = score.error if score is not None else "the service gave no score"
        return Tried(name, None, error, stored=stored.get(name))
    return Tried(name, score.score, components=dict(score.components), stored=stored.get(name))


async def _ask(
    address: str, samples: Sequence[EncodedSample], params: Mapping[str, str], timeout_s: float
) -> tuple[str, dict[str, RewardScore]]:
    async with open_channel(address, Options()) as channel:
        described = await RewardServiceStub(channel).Describe(DescribeRequest(), timeout=timeout_s)
        scores: dict[str, RewardScore] = {}
        for call in _calls(samples, described):
            answer = await score_method(channel)(ScoreCall(call, params).write(), timeout=timeout_s)
            scores |= {score.sample_id: score for score in answer.scores}
    return f"{described.name} {described.version}", scores


def _calls(samples: Sequence[EncodedSample], described: DescribeResponse) -> Iterator[Sequence[EncodedSample]]:
    if described.needs_group:
        for _, members in itertools.groupby(samples, key=lambda sample: sample.group_id):
            yield list(members)
        return
    size = min(described.max_batch_size or CALL_SAMPLES, CALL_SAMPLES)
    yield from (samples[start : start + size] for start in range(0, len(samples), size))
