"""Checks a reward service's answers, sample by sample. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from flowfleet.proto import reward_pb2
from flowfleet.rewards.requests import MAX_SCORE, EncodedSample

Fault = Literal["", "error", "missing", "duplicated", "empty", "not_finite", "out_of_range", "exchanged", "pending"]
"""Why an answer has no score: "error" and "pending" are what the service said itself; the others are its mistakes."""

SAID: Final = ("error", "pending")

TOLERANCE = 1e-6
"""Tolerance for scores outside the described range, relative to a limit beyond ± 1: float32 arithmetic needs it."""


@dataclass(frozen=True)
class Answer:
    """Answer of one reward for one sample. `problem` says why `score` is not set."""

    score: float | None
    problem: str = ""
    fault: Fault = ""
    components: dict[str, float] = field(default_factory=dict)
    version: str = ""
    """Name and version of the scorer, as "ocr 1.2"."""
    seconds: float = 0.0
    """From the call that it was in to the answer."""


def read_answers(
    samples: Sequence[EncodedSample],
    response: reward_pb2.ScoreResponse,
    described: reward_pb2.DescribeResponse,
    seconds: float,
) -> dict[str, Answer]:
    """Returns one answer per sample, whatever came back. If one score is of another sample's media, none counts."""
    by_id: dict[str, list[reward_pb2.RewardScore]] = defaultdict(list)
    for one in response.scores:
        by_id[one.sample_id].append(one)
    version = f"{described.name} {response.version or described.version}".strip()
    unknown = sorted(by_id.keys() - {sample.sample_id for sample in samples})
    found = {}
    exchanged = _exchanged(samples, by_id)
    for sample in samples:
        score, fault, problem = _read(by_id[sample.sample_id], described, unknown)
        if exchanged and fault not in SAID:
            score, fault, problem = None, "exchanged", exchanged
        components = dict(by_id[sample.sample_id][0].components) if fault in ("", *SAID) else {}
        found[sample.sample_id] = Answer(score, problem, fault, components, version, seconds)
    return found


def is_rubbish(answers: Sequence[Answer]) -> bool:
    """True if the service is at fault, not a sample: it gave several answers and none that can be used."""
    return len(answers) > 1 and all(answer.fault not in ("", *SAID) for answer in answers)


def _exchanged(samples: Sequence[EncodedSample], by_id: Mapping[str, Sequence[reward_pb2.RewardScore]]) -> str:
    """Describes the first score that is of other media than its sample's; empty where none is."""
    for sample in samples:
        for one in by_id[sample.sample_id]:
            if one.media_size not in (0, len(sample.media)):
                return (
                    f"scores of the call are exchanged: {sample.sample_id!r} has {len(sample.media)} bytes of media, "
                    f"its score is of {one.media_size}"
                )
    return ""


def _read(
    scores: Sequence[reward_pb2.RewardScore], described: reward_pb2.DescribeResponse, unknown: Sequence[str]
) -> tuple[float | None, Fault, str]:
    if not scores:
        others = f"; it has sample_id {', '.join(map(repr, unknown[:3]))}, which was not sent" if unknown else ""
        return None, "missing", f"its sample_id is missing in the response{others}"
    if len(scores) > 1:
        return None, "duplicated", f"its sample_id is in the response {len(scores)} times"
    outcome = scores[0].WhichOneof("outcome")
    if outcome == "error":
        return None, "error", scores[0].error or "an error without a text"
    if outcome == "pending":
        return None, "pending", scores[0].pending or "a pending score without a text"
    if outcome is None:
        return None, "empty", "it has neither score nor error"
    score, low, high = scores[0].score, described.score_min, described.score_max
    if not abs(score) <= MAX_SCORE:
        return None, "not_finite", f"the score is {score}"
    if not _within(score, low, high):
        return None, "out_of_range", f"the score {score:g} is outside {low:g} … {high:g}, which Describe promises"
    return score, "", ""


def _within(score: float, low: float, high: float) -> bool:
    """A range from 0 to 0, or backwards, is none."""
    return not low < high or low - _slack(low) <= score <= high + _slack(high)


def _slack(limit: float) -> float:
    return TOLERANCE * max(1.0, abs(limit))
