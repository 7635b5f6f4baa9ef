"""Errors between a reward service and its caller, in words that name the service and what to change.

The controller asks rewards for scores, the trainer for gradients.
"""

import re
from typing import Final, Literal

import grpc

from flowfleet.errors import FlowfleetError, InvalidRequest, Unavailable
from flowfleet.proto.reward_pb2 import DescribeResponse
from flowfleet.rewards.requests import CONTRACT

Caller = Literal["controller", "trainer"]

_CODE = grpc.StatusCode

PERMANENT: Final = frozenset(
    {_CODE.INVALID_ARGUMENT, _CODE.UNIMPLEMENTED, _CODE.UNAUTHENTICATED, _CODE.PERMISSION_DENIED}
)
"""The same call fails again until somebody changes something."""

_TRANSPORT: Final = re.compile(
    r"^(?!settings\.).*\b(?:connect\w*|refused|socket|goaway|cancelling all|dns|resol\w+|stream removed|keepalive|ping|"
    r"broken pipe|end of|http\d?|recvmsg|no message|reset|closed|shutdown)\b",
    re.IGNORECASE | re.DOTALL,
)
"""Words of gRPC itself about a service that it does not reach; others are the service's own."""
_SETTING = "the controller's --reward, in a cluster the chart's rewards"


class RewardUnavailable(Unavailable):
    """A reward gave nothing, and is asked again. `args`: the message, and the reward's name."""

    def __str__(self) -> str:
        return str(self.args[0])


class RewardRefused(InvalidRequest):
    """A reward gives nothing until somebody changes something. `args`: the message, and the reward's name."""

    def __str__(self) -> str:
        return str(self.args[0])


def reward_of(error: FlowfleetError) -> str:
    """Name of the reward that a `RewardUnavailable` or `RewardRefused` is about; "" where it is not known."""
    return str(error.args[1]) if len(error.args) > 1 else ""


def may_heal(error: grpc.aio.AioRpcError) -> bool:
    """Returns True if the remedy may be under way: new tokens reach services one after the other."""
    return error.code() is _CODE.UNAUTHENTICATED


def is_too_large(error: grpc.aio.AioRpcError) -> bool:
    """Returns True if the service rejected a message for its size."""
    details = (error.details() or "").lower()
    return error.code() is _CODE.RESOURCE_EXHAUSTED and "message" in details and "larger than" in details


def of_call(
    name: str, service: str, address: str, error: grpc.aio.AioRpcError, deadline_s: float | None, caller: Caller
) -> str:
    """Describes a failed call to the reward `name`. `deadline_s` is `timeouts.score_s`, or None for Describe."""
    return f"{at(name, service, address)} {_what(error, deadline_s, caller)}"


def at(name: str, service: str, address: str = "") -> str:
    """Returns the beginning of a message about a reward."""
    return f"rewards.{name}: service {service!r}" + (f" at {address}" if address else "")


def newer_contract(name: str, service: str, described: DescribeResponse, caller: Caller) -> str:
    """Why a service cannot be asked; "" if it can."""
    if described.contract <= CONTRACT:
        return ""
    return (
        f"{at(name, service)} speaks contract {described.contract} of RewardService, but this {caller} knows "
        f"{CONTRACT}: upgrade the {caller}, or start an older version of it"
    )


def without_gradient(name: str, service: str, described: DescribeResponse) -> str:
    """Why a loss cannot train on a reward's gradient; "" if it can."""
    if described.gives_gradient:
        return ""
    scorer = f"{described.name} {described.version}".strip()
    return (
        f"{at(name, service)} gives no gradient ({scorer}), and the job's loss trains on it: use a reward that gives "
        "one, and give this one weight 0"
    )


def _what(error: grpc.aio.AioRpcError, deadline_s: float | None, caller: Caller) -> str:
    details = error.details() or "no message"
    match code := error.code():
        case _CODE.UNAVAILABLE if "TLS" in details or "certificate" in details:
            return f"cannot be reached: {details}"
        case _CODE.UNAVAILABLE if not _TRANSPORT.search(details):
            return f"gives nothing now: {details}"
        case _CODE.UNAVAILABLE:
            return f"cannot be reached ({details}): start it, or correct its address ({_SETTING})"
        case _CODE.DEADLINE_EXCEEDED:
            if deadline_s is None:
                return f"did not answer Describe: restart it, or correct its address ({_SETTING})"
            return f"gave no answer in {deadline_s:g} s: make it faster, or raise timeouts.score_s"
        case _CODE.UNIMPLEMENTED if caller == "trainer" and deadline_s is not None:
            return (
                f"has no ScoreWithGradient ({details}), though it says that it gives gradients: serve that method, or "
                "give the reward weight 0"
            )
        case _CODE.UNIMPLEMENTED:
            return (
                f"is no flowfleet.v1.RewardService ({details}): another service answers at this address, correct it "
                f"({_SETTING})"
            )
        case _CODE.UNAUTHENTICATED | _CODE.PERMISSION_DENIED:
            return (
                f"refuses the {caller} ({details}): its FLOWFLEET_RPC_TOKEN must be the {caller}'s "
                "FLOWFLEET_REWARD_RPC_TOKEN, or FLOWFLEET_RPC_TOKEN where that is not set"
            )
        case _CODE.INVALID_ARGUMENT:
            return f"refuses the request: {details}"
        case _CODE.RESOURCE_EXHAUSTED if is_too_large(error):
            return (
                f"takes no more ({details}): raise its limit for received messages, or lower rollout.height and "
                "rollout.width"
            )
        case _CODE.RESOURCE_EXHAUSTED:
            return f"takes no more ({details}): add replicas"
        case _:
            return f"failed with {code.name} ({details}): its log may have the reason"
