"""Why a reward gave no scores, in words that name the service and what to change."""

from __future__ import annotations

import grpc

from services.controller.waiting import NotYet, WaitedInVain

_CODE = grpc.StatusCode

PERMANENT = frozenset({_CODE.INVALID_ARGUMENT, _CODE.UNIMPLEMENTED, _CODE.UNAUTHENTICATED, _CODE.PERMISSION_DENIED})
"""The same call fails again until somebody changes something."""

_SETTING = "the controller's --reward, in a cluster the chart's rewards"


class RewardFailure(NotYet):
    """A reward gave no scores. It is asked again, unless `permanent`: then somebody must change something first. If it
    `may_heal`, that may be under way: new tokens reach services one after the other."""

    def __init__(self, message: str, *, permanent: bool = False, may_heal: bool = False) -> None:
        super().__init__(message)
        self.permanent, self.may_heal = permanent, may_heal


class RewardPending(WaitedInVain):
    """Scores of a reward are not there yet, which is not a failure: the job says so and asks again in `again_s`."""

    def __init__(self, message: str, again_s: float) -> None:
        super().__init__(message)
        self.again_s = again_s


class RewardPause(Exception):
    """The job must pause because a reward failed for too long. The message is the job's reason."""


def of_call(
    name: str, service: str, address: str, error: grpc.aio.AioRpcError, deadline_s: float | None
) -> RewardFailure:
    """What a failed call tells of the reward `name`: of Score, which has `timeouts.score_s`, or of Describe (None)."""
    code, details = error.code(), error.details() or ""
    return RewardFailure(
        f"rewards.{name}: service {service!r} at {address} {_what(code, details, deadline_s)}",
        permanent=code in PERMANENT,
        may_heal=code is _CODE.UNAUTHENTICATED,
    )


def why_failed(name: str, failure: RewardFailure, waited_s: float | None, is_away: bool) -> str:
    """Why a job pauses for a reward that failed: at once (None), or for so long, on all samples or on the same ones."""
    of_what = "" if is_away else " on the same samples, while others were scored"
    waited = "" if waited_s is None else f" It failed for timeouts.rewards_s = {waited_s:g} s{of_what}."
    return (
        f'{failure}.{waited} The job is paused as rewards.{name}.on_failure = "pause" says: put it right, then '
        "resume the job; its samples are kept and asked for again"
    )


def why_pending(name: str, why: str, waited_s: float) -> str:
    """Why a job pauses for a reward whose scores are pending."""
    return (
        f"rewards.{name} gave no scores within timeouts.pending_s = {waited_s:g} s: {why}. The job is paused as "
        f'rewards.{name}.on_failure = "pause" says: resume it to wait again; its samples are kept'
    )


def is_too_large(error: grpc.aio.AioRpcError) -> bool:
    """Whether the service refused a message for its size."""
    details = (error.details() or "").lower()
    return error.code() is _CODE.RESOURCE_EXHAUSTED and "message" in details and "larger than" in details


def _what(code: grpc.StatusCode, details: str, deadline_s: float | None) -> str:
    match code:
        case _CODE.UNAVAILABLE if "TLS" in details or "certificate" in details:
            return f"cannot be reached: {details}"
        case _CODE.UNAVAILABLE:
            return f"cannot be reached ({details}): start it, or correct its address ({_SETTING})"
        case _CODE.DEADLINE_EXCEEDED:
            if deadline_s is None:
                return f"did not answer Describe: restart it, or correct its address ({_SETTING})"
            return f"gave no answer in {deadline_s:g} s: make it faster, or raise timeouts.score_s"
        case _CODE.UNIMPLEMENTED:
            return (
                f"is no flowfleet.v1.RewardService ({details}): another service answers at this address, correct it "
                f"({_SETTING})"
            )
        case _CODE.UNAUTHENTICATED | _CODE.PERMISSION_DENIED:
            return (
                f"refuses the controller ({details}): its FLOWFLEET_RPC_TOKEN must be the controller's "
                "FLOWFLEET_REWARD_RPC_TOKEN, or FLOWFLEET_RPC_TOKEN where that is not set"
            )
        case _CODE.INVALID_ARGUMENT:
            return f"refuses the request: {details}"
        case _CODE.RESOURCE_EXHAUSTED:
            return f"takes no more ({details}): raise its limit for received messages, or add replicas"
        case _:
            return f"failed with {code.name} ({details}): its log may have the reason"
