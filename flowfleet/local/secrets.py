"""Secrets of a stack on one machine: new at each start, one file per kind in a folder that only its owner can read.

`secrets/KIND.env` (0600, in a folder of 0700) holds the environment variables of processes of that kind, in a shell's
syntax, so that an operator can run another one, or call a service, as that kind. No command line has a secret.
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flowfleet.api.access import Right
from flowfleet.local.files import make_private, read_own, write_atomically
from flowfleet.process import service
from flowfleet.redis import acl as redis_acl
from flowfleet.redis.server import new_password, server_url
from flowfleet.rpc import kinds
from flowfleet.rpc.kinds import Kind


def _new_token() -> str:
    return secrets.token_urlsafe(32)


@dataclass(frozen=True)
class StackSecrets:
    """Passwords of Redis's users, and a token for each kind that calls another or is called by the controller."""

    operator: str = field(default_factory=new_password)
    """Password of Redis's default user."""
    redis: Mapping[str, str] = field(default_factory=lambda: {kind: new_password() for kind in redis_acl.RULES})
    """Passwords by kind."""
    controller: str = field(default_factory=_new_token)
    trainer: str = field(default_factory=_new_token)
    sampler: str = field(default_factory=_new_token)
    """Token that the controller sends to rollouts."""
    reward: str = field(default_factory=lambda: service.secret(service.RPC_TOKEN) or _new_token())
    """The user's, because rewards that run elsewhere may ask for it, else a new one."""
    api_key: str = field(default_factory=lambda: service.secret(service.API_KEY) or _new_token())
    """Key of the REST API, which may do everything: the user's, else a new one; empty: the controller asks for none."""
    asking: str = field(default_factory=_new_token)
    """Key by which a reward asks people for votes."""

    def environments(self, redis_port: int) -> dict[Kind, dict[str, str]]:
        """Returns the environment variables of each kind's processes. Trainers get theirs from the controller."""
        urls = {kind: server_url(redis_port, password, kind) for kind, password in self.redis.items()}
        accept = kinds.accept({"controller": self.controller, "sampler": self.sampler, "trainer": self.trainer})
        trainer = {
            "FLOWFLEET_REDIS_URL": urls["trainer"],
            service.RPC_TOKEN: self.trainer,
            service.RPC_ACCEPT: accept,
            kinds.REWARD_TOKEN: self.reward,
        }
        return {
            "controller": {
                "FLOWFLEET_REDIS_URL": urls["controller"],
                service.RPC_TOKEN: self.controller,
                kinds.REWARD_TOKEN: self.reward,
                kinds.ROLLOUT_TOKEN: self.sampler,
                **({service.API_KEY: self.api_key} if self.api_key else {}),
                **{kinds.OF_TRAINERS + name.removeprefix("FLOWFLEET_"): value for name, value in trainer.items()},
            },
            "rollout": {"FLOWFLEET_REDIS_URL": urls["rollout"], service.RPC_ACCEPT: accept},
            "reward": {service.RPC_TOKEN: self.reward},
        }

    def keys(self) -> str:
        """Returns the controller's `--keys-file`."""
        digest = hashlib.sha256(self.asking.encode()).hexdigest()
        return f'[human]\nsha256 = "{digest}"\nmay = "{Right.ASK}"\n'


def write(folder: Path, environments: Mapping[Kind, Mapping[str, str]]) -> None:
    """Writes a file for each kind, whatever the umask and whatever was there."""
    make_private(folder)
    for kind, environment in environments.items():
        lines = (f"{name}={shlex.quote(value)}\n" for name, value in environment.items())
        write_atomically(folder / f"{kind}.env", "".join(lines))


def read(folder: Path, kind: Kind) -> dict[str, str]:
    """The environment of a kind."""
    lines = read_own(folder / f"{kind}.env").splitlines()
    return {name: "".join(shlex.split(value)) for name, _, value in (line.partition("=") for line in lines)}
