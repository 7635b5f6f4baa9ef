"""The kinds of services: which gRPC methods each may call, how it proves its kind, and what a trainer is handed.

A caller proves its kind by its token and, with mutual TLS, by its certificate.

    FLOWFLEET_RPC_TOKEN         the token that a process sends; without FLOWFLEET_RPC_ACCEPT also the one it asks for
    FLOWFLEET_RPC_ACCEPT        callers that a server admits: kind=SHA-256 of the kind's token in hex, with commas
    FLOWFLEET_REWARD_RPC_TOKEN  the token that a controller or trainer sends to rewards, in place of its own
    FLOWFLEET_ROLLOUT_RPC_TOKEN the token that a controller sends to rollouts, in place of its own
    FLOWFLEET_RPC_ACCEPT_JOB    SHA-256 in hex of the token that the controller sends to the trainer of one job
    FLOWFLEET_JOB_USERS         "no": trainers share FLOWFLEET_TRAINER_REDIS_URL, for a Redis without users
    FLOWFLEET_TRAINER_NAME      FLOWFLEET_NAME of the trainers that a controller starts on its machine

A job's trainer sends a token of its own, "JOB/ATTEMPT/SIGNATURE". Servers check it by the digest of the trainers'
token, which no trainer has. It opens what a trainer may call for that job alone, until a later attempt has called.

A server sees the token of each call. So what a controller sends to rewards opens nothing else, what it sends to
rollouts, as the caller `sampler`, opens rollouts alone, and what it sends to a trainer opens that trainer alone. A
certificate with the DNS name `<kind>.<FLOWFLEET_TLS_NAME>` is of that kind; one without any such name is the whole
fleet's.
"""

import hashlib
import hmac
import os
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from flowfleet.process import service
from flowfleet.redis.acl import job_user
from flowfleet.redis.client import REDIS_LOGIN

Kind = Literal["controller", "rollout", "trainer", "reward", "redis"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Caller = Literal[Kind, "sampler"]
"""A kind, or the controller by the token that it sends to rollouts."""
CALLERS: Final[tuple[Caller, ...]] = get_args(Caller)

REWARD_TOKEN: Final = "FLOWFLEET_REWARD_RPC_TOKEN"
ROLLOUT_TOKEN: Final = "FLOWFLEET_ROLLOUT_RPC_TOKEN"
JOB_ACCEPT: Final = "FLOWFLEET_RPC_ACCEPT_JOB"
JOB_USERS: Final = "FLOWFLEET_JOB_USERS"
OF_TRAINERS: Final = "FLOWFLEET_TRAINER_"

_ALL: Final = "*"
_ROLLOUT: Final = "/flowfleet.v1.RolloutService/"
_TRANSFER: Final = ("InitWeightTransfer", "StartWeightUpdate", "UpdateWeights", "FinishWeightUpdate", "PullAdapter")
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
    r"FLOWFLEET_(API_KEY|ARCHIVE|REDIS_URL|REDIS_LOGIN|RPC_TOKEN|RPC_ACCEPT|(READER|REWARD|ROLLOUT|TRAINER)_.*)"
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

    signer: str = ""
    """Key of the signatures in tokens of jobs' trainers; "" admits none."""

    def __bool__(self) -> bool:
        return bool(self.token or self.digests)

    def kind_of(self, token: str) -> Caller | None:
        """Returns the kind that sends this token, None for a stranger. A fleet's only token is its controller's."""
        if self.token is not None and hmac.compare_digest(token.encode(), self.token.encode()):
            return "controller"
        if self.trainer_of(token):
            return "trainer"
        sent = digest(token)
        matching = [kind for kind, expected in self.digests if hmac.compare_digest(sent, expected)]
        return matching[0] if matching else None

    def trainer_of(self, token: str) -> tuple[str, int] | None:
        """Returns job and attempt of the token of a job's trainer; None for any other token."""
        job_id, _, attempt = token.rpartition("/")[0].rpartition("/")
        if not (self.signer and attempt.isdecimal()):
            return None
        expected = _signed(self.signer, job_id, int(attempt))
        return (job_id, int(attempt)) if hmac.compare_digest(token.encode(), expected.encode()) else None


def _signed(key: str, job_id: str, attempt: int) -> str:
    words = f"{job_id}/{attempt}"
    return f"{words}/{hmac.new(key.encode(), words.encode(), hashlib.sha256).hexdigest()}"


def callers_from_env() -> Callers:
    """Callers named by FLOWFLEET_RPC_ACCEPT, else the holders of FLOWFLEET_RPC_TOKEN; besides them the controller by
    FLOWFLEET_RPC_ACCEPT_JOB. Raises ValueError for malformed values."""
    text = os.environ.get(service.RPC_ACCEPT, "").strip()
    of_job = os.environ.get(JOB_ACCEPT, "").strip()
    if of_job and not _DIGEST.fullmatch(of_job):
        raise ValueError(f"{JOB_ACCEPT} must be the SHA-256 of a token in hex")
    digests: list[tuple[Caller, str]] = [("controller", of_job)] if of_job else []
    own = service.secret(service.RPC_TOKEN)
    if not text:
        return Callers(own, tuple(digests), _signer_of(own) if own else "")
    if own and own.count("/") == 2:  # a trainer, whose ranks take weights from each other
        digests.append(("trainer", digest(own)))
    for part in text.split(","):
        kind, _, value = part.strip().partition("=")
        if kind not in CALLERS or not _DIGEST.fullmatch(value):
            raise ValueError(f"{service.RPC_ACCEPT} must be KIND=SHA256,… with a KIND of {', '.join(CALLERS)}")
        digests.append((kind, value))
    return Callers(digests=tuple(digests), signer=dict(digests).get("trainer", "") if "trainer=" in text else "")


def accept(tokens: Mapping[Caller, str]) -> str:
    """FLOWFLEET_RPC_ACCEPT for a server that admits the holders of these tokens."""
    return ",".join(f"{kind}={digest(token)}" for kind, token in tokens.items())


def job_token(job_id: str) -> str | None:
    """The token that a controller sends to the trainer of a job: HMAC-SHA256 of the job's id by the controller's own.
    Whoever sees it learns neither that one nor another job's. None where the controller has no token."""
    key = service.secret(service.RPC_TOKEN)
    return hmac.new(key.encode(), f"trainer of job {job_id}".encode(), hashlib.sha256).hexdigest() if key else None


def _signer_of(token: str) -> str:
    """Key of signatures in a fleet with one token. It is not the token's digest, which trainers are given."""
    return digest(f"signs tokens of trainers: {token}")


def job_secrets(job_id: str) -> dict[str, str]:
    """Environment by which a process is the trainer of this job alone, in its next attempt: its user of Redis, the
    token that it sends, and the callers that it admits. Empty where the controller has no token."""
    own, of_trainers = service.secret(service.RPC_TOKEN), service.secret(OF_TRAINERS + "RPC_TOKEN")
    if not own:
        return {}
    signer = digest(of_trainers) if of_trainers else _signer_of(own)
    accept = os.environ.get(OF_TRAINERS + "RPC_ACCEPT", "") or f"controller={digest(own)}"
    login = {REDIS_LOGIN: f"{job_user(job_id)}:{job_password(job_id)}"} if has_job_users() else {}
    return {
        **login,
        service.RPC_TOKEN: _signed(signer, job_id, time.time_ns()),
        service.RPC_ACCEPT: ",".join(part for part in accept.split(",") if not part.strip().startswith("trainer=")),
    }


def has_job_users() -> bool:
    """Returns True if the controller makes a user of Redis for each job's trainer."""
    return bool(service.secret(service.RPC_TOKEN)) and os.environ.get(JOB_USERS) != "no"


def job_password(job_id: str) -> str:
    """Password of the user of a job's trainer. Nothing stores it: the next controller finds the same one."""
    key = service.secret(service.RPC_TOKEN)
    assert key is not None, "there are no such users without a token"
    return hmac.new(key.encode(), f"Redis user of job {job_id}".encode(), hashlib.sha256).hexdigest()


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
