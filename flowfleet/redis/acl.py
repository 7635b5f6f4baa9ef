"""Rights of each kind of service in Redis: users, commands and keys, in this one place.

`RULES` is the table. `user_rules` writes it in Redis's ACL language, for a server's configuration and for `ACL
SETUSER`. Redis 7 and later hold each rule by itself (a selector). Redis 6.2 has none, so a user may there run any of
its commands on any of its keys. The default user is the operator's: it may do everything.

Rewards have no user: they never connect to Redis. KEDA asks the controllers, not Redis.

A job's trainer has a user of its own, which the controller makes (`job_user`): it reaches the keys of that job alone.
The user `trainer` of the table only connects, and asks Sentinels.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flowfleet.redis import keys

OPERATOR: Final = "default"
"""The user of operators and tools, by Redis's own name."""
JOB_USER: Final = "trainer-"
"""Begins the name of the user of a job's trainer."""


@dataclass(frozen=True)
class Rule:
    """Commands and the keys that they may take. Commands without keys need none."""

    purpose: str
    commands: tuple[str, ...]
    """`+command`, `+@category` or `-@category`, in Redis's order: the last that matches decides."""
    keys: tuple[str, ...] = ()
    """Glob patterns."""
    channels: tuple[str, ...] = ()
    """Channels for publish and subscribe."""


_CONNECT: Final = Rule("greet the server", ("+@connection", "-@admin", "-@dangerous"))
_BLOBS: Final = "ff:*:blob:*"
_MODELS: Final = Rule("find peers with a model", ("+lrem", "+rpush", "+ltrim", "+lrange"), ("ff-fleet:models:*",))


def _samples(job: str) -> tuple[Rule, ...]:
    """Rights of a replica: a rollout, of all jobs ("*"), or a trainer's rank that samples."""
    kinds = ("embeds", "media", "negative", "trajectory")
    return (
        Rule("store samples", ("+set",), tuple(f"ff:{job}:blob:{kind}:*" for kind in kinds)),
        Rule("announce samples", ("+xadd",), (f"ff:{job}:trajectories",)),
        Rule("keep its record among the replicas, by script", ("+evalsha",), ("ff-fleet:replicas:*",)),
        Rule("own its name", ("+get", "+set"), ("ff-fleet:replicas:owner:*",)),
        Rule("write its record", ("+hdel", "+hget", "+hset"), (keys.replicas("records"),)),
        Rule("count its changes", ("+incr",), (keys.replicas("revision"),)),
        Rule("tell when it changed", ("+zadd", "+zrem"), (keys.replicas("renewed"), keys.replicas("changed"))),
        Rule("load the script", ("+script|load", "+time")),
    )


def job_rules(job_id: str, *, samples: bool) -> tuple[Rule, ...]:
    """Rights of a job's trainer. `samples`: its ranks are replicas too."""
    return (
        _CONNECT,
        Rule("read samples", ("+get",), (f"ff:{job_id}:blob:*",)),
        Rule(
            "publish adapters",
            ("+set", "+expire", "+unlink"),
            tuple(f"ff:{job_id}:blob:{kind}:*" for kind in ("adapter", "evaluated")),
        ),
        _MODELS,
        *(_samples(job_id) if samples else ()),
    )


RULES: Final[Mapping[str, tuple[Rule, ...]]] = {
    "controller": (
        Rule(
            "run jobs: every key of jobs and fleet, users of jobs' trainers, no other administration of the server",
            ("+@all", "-@admin", "-@dangerous", "+info", "+acl|setuser", "+acl|deluser", "+acl|users"),
            ("ff:*", "ff-fleet:*"),
            (keys.changes(),),
        ),
    ),
    "rollout": (_CONNECT, Rule("read adapters and given media", ("+get",), (_BLOBS,)), *_samples("*"), _MODELS),
    "trainer": (_CONNECT,),
}
"""Rules by kind of service, which is the user's name."""

SENTINEL_RULE: Final = Rule(
    "ask a Sentinel for the primary", (*_CONNECT.commands, "+sentinel|masters", "+sentinel|get-master-addr-by-name")
)
"""Rights of each kind at a Sentinel. Only the operator may change anything there."""


def user_rules(kind: str, *, selectors: bool = True) -> str:
    """The rights of a kind's user in Redis's ACL language, without its password. `selectors`: for Redis 7 and later."""
    return " ".join(_rights(RULES[kind], selectors))


def job_user(job_id: str) -> str:
    """Name of the user of a job's trainer."""
    return JOB_USER + job_id


def job_words(job_id: str, password: str, *, samples: bool, selectors: bool = True) -> list[str]:
    """Arguments of `ACL SETUSER` that make the user of a job's trainer, or set it again."""
    given = ["reset", "on", f"#{hashlib.sha256(password.encode()).hexdigest()}"]
    return [job_user(job_id), *given, *_rights(job_rules(job_id, samples=samples), selectors)]


def config_lines(passwords: Mapping[str, str], *, selectors: bool = True) -> str:
    """`user` lines of redis.conf by kind, with digests in place of the passwords."""
    return "".join(f"user {kind} {_user(kind, password, selectors)}\n" for kind, password in passwords.items())


def setuser_lines(passwords: Mapping[str, str], *, selectors: bool = True) -> str:
    """Commands for `redis-cli` that make the users of an existing server, or set them again."""
    users = {kind: _user(kind, password, selectors) for kind, password in passwords.items()}
    quoted = {kind: user.replace("(", '"(').replace(")", ')"') for kind, user in users.items()}
    return "".join(f"ACL SETUSER {kind} reset {user}\n" for kind, user in quoted.items())


def _user(kind: str, password: str, selectors: bool) -> str:
    return f"on #{hashlib.sha256(password.encode()).hexdigest()} {user_rules(kind, selectors=selectors)}"


def _rights(rules: Sequence[Rule], selectors: bool) -> list[str]:
    simple = [rule for rule in rules if not (selectors and rule.keys and len(rules) > 1)]
    words = ["resetkeys", "resetchannels", "-@all"]
    words += [word for rule in simple for word in _words(rule)]
    return words + [f"({' '.join(_words(rule))})" for rule in rules if rule not in simple]


def _words(rule: Rule) -> list[str]:
    return [*rule.commands, *(f"~{key}" for key in rule.keys), *(f"&{channel}" for channel in rule.channels)]
