"""Checks: each has a name, the contract's requirement, and a coroutine function that asks the service.

It returns what it saw, or raises `Fault` where the contract is broken, `Remark` for what is allowed but worth knowing,
and `Skip` for what cannot be asked. A check looks at one rule and is lenient in all others, so that one mistake of a
service fails one check. A check that depends on another rule names it in `needs` and is skipped where that is broken.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from flowfleet.conformance.session import Answer, Session
from flowfleet.proto.reward_pb2 import RewardScore, ScoreResponse

Ask = Callable[[Session], Awaitable[str | None]]


class Fault(Exception):
    """The contract is broken; the message says what was seen."""


class Remark(Exception):
    """Allowed, and worth knowing."""


class Skip(Exception):
    """Cannot be asked; the message says why."""


@dataclass(frozen=True)
class Check:
    """Check of one rule."""

    name: str
    rule: str
    needs: tuple[str, ...]
    """Checks that must not have failed."""
    ask: Ask
    is_last: bool = False
    """Asked after those of every module: about all scores, or the service after all calls."""


def check(name: str, rule: str, *needs: str, is_last: bool = False) -> Callable[[Ask], Check]:
    """Makes a check of a coroutine function."""
    return lambda ask: Check(name, rule, needs, ask, is_last)


def require(holds: object, message: str) -> None:
    """Fault with the message unless it holds."""
    if not holds:
        raise Fault(message)


def require_refused(answer: Answer, *codes: grpc.StatusCode) -> str:
    """The message of a call that must end with one of these codes and say something; Fault otherwise."""
    names = " or ".join(code.name for code in codes)
    if isinstance(answer, ScoreResponse):
        raise Fault(f"the call was answered: {outcomes(answer)}; end it with {names}")
    require(answer.code() in codes, f"the call ended with {said(answer)}; end it with {names}")
    require(answer.details(), f"{answer.code().name} came without a message: say what to change")
    return said(answer)


def require_scores(scores: dict[str, RewardScore], ids: list[str]) -> None:
    """Fault unless each of these samples has a score, or one that is pending."""
    for sample_id in ids:
        require(sample_id in scores, f"sample {sample_id!r} is missing in the answer")
        kind = scores[sample_id].WhichOneof("outcome")
        require(kind in ("score", "pending"), f"{sample_id!r}: {outcome(scores[sample_id])}")


def said(error: grpc.aio.AioRpcError) -> str:
    """A status in one line."""
    return f"{error.code().name}: {error.details() or 'no message'}"


def outcome(score: RewardScore) -> str:
    """A score in one line."""
    kind = score.WhichOneof("outcome")
    if kind == "score":
        return f"score {score.score:g}"
    if kind == "pending":
        return f"pending {score.pending!r}"
    return f"error {score.error!r}" if kind == "error" else "neither score nor error"


def outcomes(answer: ScoreResponse) -> str:
    """The first three."""
    shown = [f"{score.sample_id!r}: {outcome(score)}" for score in answer.scores[:3]]
    return ", ".join([*shown, "…"] if len(answer.scores) > len(shown) else shown) or "no scores"


def alike(left: float, right: float, tolerance: float) -> bool:
    """Within the tolerance, relative to the larger of 1 and the scores. Two that are not finite are alike."""
    if left == right or (left != left and right != right):
        return True
    return abs(left - right) <= tolerance * max(1.0, abs(left), abs(right))
