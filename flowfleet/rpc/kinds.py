"""The kinds of services: which gRPC methods each may call, how it proves its kind, and what a trainer is handed.

A caller proves its kind by its token and, with mutual TLS, by its certificate.

    FLOWFLEET_RPC_TOKEN         the token that a process sends; without FLOWFLEET_RPC_ACCEPT also the one it asks for
    FLOWFLEET_RPC_ACCEPT        callers that a server admits: kind=SHA-256 of the kind's token in hex, with commas
    FLOWFLEET_REWARD_RPC_TOKEN  the token that a controller or trainer sends to rewards, in place of its own
    FLOWFLEET_ROLLOUT_RPC_TOKEN the token that a controller sends to rollouts, in place of its own
    FLOWFLEET_RPC_ACCEPT_JOB    SHA-256 in hex of the token that the controller sends to the trainer of one job
    FLOWFLEET_TRAINER_NAME      FLOWFLEET_NAME of the trainers that a controller starts on its machine

A server sees the token of each call. So what a controller sends to rewards opens nothing else, what it sends to
rollouts, as the caller `sampler`, opens rollouts alone, and what it sends to a trainer opens that trainer alone. A
certificate with the DNS name `<kind>.<FLOWFLEET_TLS_NAME>` is of that kind; one without any such name is the whole
fleet's.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from flowfleet.process import service

Kind = Literal["controller", "rollout", "trainer", "reward", "redis"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Caller = Literal[Kind, "sampler"]
"""A kind, or the controller by the token that it sends to rollouts."""
CALLERS: Final[tuple[Caller, ...]] = get_args(Caller)

REWARD_TOKEN: Final = "FLOWFLEET_REWARD_RPC_TOKEN"
ROLLOUT_TOKEN: Final = "FLOWFLEET_ROLLOUT_RPC_TOKEN"
JOB_ACCEPT: Final = "FLOWFLEET_RPC_ACCEPT_JOB"
OF_TRAINERS: Final = "FLOWFLEET_TRAINER_"

_ALL: Final = "*"
_ROLLOUT: Final = "/flowfleet.v1.RolloutService/"
_TRANSFER: Final = ("InitWeightTransfer", "StartWeightUpdate", "UpdateWeights", "FinishWeightUpdate")
_REWARD: Final = "/flowfleet.v1.RewardService/"
MAY_CALL: Final[Mapping[Caller, tuple[str, ...]]] = {
    "controller": (_ALL,),
    "sampler": tuple(_ROLLOUT + method for method in ("GetStatus", "Generate", "Drain")),
    "trainer": (
        *(_ROLLOUT + method for method in ("GetStatus", *_TRANSFER)),
        *(_REWARD + method for method in ("Describe", "ScoreWithGradient")),
    ),
    "rollout": ("/flowfleet.v1.ModelService/Read",),
    "reward": (),
    "redis": (),
}
"""Full names of gRPC methods by the kind of their caller. Everyone may ask the health service."""
_HEALTH: Final = "/grpc.health.v1.Health/"

_OWN: Final = re.compile(
    r"FLOWFLEET_(API_KEY|ARCHIVE|REDIS_URL|RPC_TOKEN|RPC_ACCEPT|(READER|REWARD|ROLLOUT|TRAINER)_.*)"
)
_FALLBACK: Final = ("FLOWFLEET_REDIS_URL", service.RPC_TOKEN, service.RPC_ACCEPT)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def is_health(method: str) -> bool:
    """Returns True if everyone may call the method, as probes do."""
    return method.startswith(_HEALTH)


def may_call(kind: Caller, method: str) -> bool:
    """Returns True if a service of this kind may call a method, given as /package.Service/Method."""
    return is_health(method) or bool({_ALL, method} & {*MAY_CALL[kind]})


def of_certificate(names: Collection[bytes], fleet: str) -> list[Kind]:
    """Kinds that a certificate with these names is for; none for the whole fleet's. `fleet`: FLOWFLEET_TLS_NAME."""
    return [kind for kind in KINDS if f"{kind}.{fleet}".encode() in names]


@dataclass(frozen=True)
class Callers:
    """Whom a server admits, by the token that a call carries."""

    token: str | None = None
    """Token that opens every method to anyone who sends it; for fleets with one token, and for rewards."""
    digests: tuple[tuple[Caller, str], ...] = ()
    """SHA-256 of the callers' tokens."""

    def __bool__(self) -> bool:
        return bool(self.token or self.digests)

    def kind_of(self, token: str) -> Caller | None:
        """Returns the kind that sends this token, None for a stranger. A fleet's only token is its controller's."""
        if self.token is not None and hmac.compare_digest(token.encode(), self.token.encode()):
            return "controller"
        sent = digest(token)
        matching = [kind for kind, expected in self.digests if hmac.compare_digest(sent, expected)]
        return matching[0] if matching else None


def callers_from_env() -> Callers:
    """Callers named by FLOWFLEET_RPC_ACCEPT, else the holders of FLOWFLEET_RPC_TOKEN; besides them the controller by
    FLOWFLEET_RPC_ACCEPT_JOB. Raises ValueError for malformed values."""
    text = os.environ.get(service.RPC_ACCEPT, "").strip()
    of_job = os.environ.get(JOB_ACCEPT, "").strip()
    if of_job and not _DIGEST.fullmatch(of_job):
        raise ValueError(f"{JOB_ACCEPT} must be the SHA-256 of a token in hex")
    digests: list[tuple[Caller, str]] = [("controller", of_job)] if of_job else []
    if not text:
        return Callers(service.secret(service.RPC_TOKEN), tuple(digests))
    for part in text.split(","):
        kind, _, value = part.strip().partition("=")
        if kind not in CALLERS or not _DIGEST.fullmatch(value):
            raise ValueError(f"{service.RPC_ACCEPT} must be KIND=SHA256,… with a KIND of {', '.join(CALLERS)}")
        digests.append((kind, value))
    return Callers(digests=tuple(digests))


def accept(tokens: Mapping[Caller, str]) -> str:
    """FLOWFLEET_RPC_ACCEPT for a server that admits the holders of these tokens."""
    return ",".join(f"{kind}={digest(token)}" for kind, token in tokens.items())


def job_token(job_id: str) -> str | None:
    """The token that a controller sends to the trainer of a job: HMAC-SHA256 of the job's id by the controller's own.
    Whoever sees it learns neither that one nor another job's. None where the controller has no token."""
    key = service.secret(service.RPC_TOKEN)
    return hmac.new(key.encode(), f"trainer of job {job_id}".encode(), hashlib.sha256).hexdigest() if key else None


def job_accept(job_id: str) -> dict[str, str]:
    """Environment by which a job's trainer admits its controller."""
    token = job_token(job_id)
    return {JOB_ACCEPT: digest(token)} if token else {}


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def without_own(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the secrets of one service: keys, tokens, URLs with passwords."""
    return {name: value for name, value in environment.items() if not _OWN.fullmatch(name)}


def trainer_environment(controller: Mapping[str, str]) -> dict[str, str]:
    """The environment of a trainer that a controller starts on its machine.

    It is the controller's without the controller's secrets. A fleet with one Redis user and one token shares these.
    """
    shared = {name: controller[name] for name in _FALLBACK if name in controller}
    named = {
        f"FLOWFLEET_{name.removeprefix(OF_TRAINERS)}": value
        for name, value in controller.items()
        if name.startswith(OF_TRAINERS)
    }
    return {**without_own(controller), **shared, **named}
