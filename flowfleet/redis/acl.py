"""Rights of each kind of service in Redis: users, commands and keys, in this one place.

`RULES` is the table. `user_rules` writes it in Redis's ACL language, for a server's configuration and for `ACL
SETUSER`. Redis 7 and later hold each rule by itself (a selector). Redis 6.2 has none, so a user may there run any of
its commands on any of its keys. The default user is the operator's: it may do everything.

Rewards have no user: they never connect to Redis. KEDA asks the controllers, not Redis.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from flowfleet.redis import keys

OPERATOR: Final = "default"
"""The user of operators and tools, by Redis's own name."""


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
_SAMPLE: Final = (
    Rule(
        "store samples",
        ("+set",),
        tuple(f"ff:*:blob:{kind}:*" for kind in ("embeds", "media", "negative", "trajectory")),
    ),
    Rule("announce samples", ("+xadd",), ("ff:*:trajectories",)),
    Rule("keep its record among the replicas, by script", ("+evalsha",), ("ff-fleet:replicas:*",)),
    Rule("own its name", ("+get", "+set"), ("ff-fleet:replicas:owner:*",)),
    Rule("write its record", ("+hdel", "+hget", "+hset"), (keys.replicas("records"),)),
    Rule("count its changes", ("+incr",), (keys.replicas("revision"),)),
    Rule("tell when it changed", ("+zadd", "+zrem"), (keys.replicas("renewed"), keys.replicas("changed"))),
    Rule("load the script", ("+script|load", "+time")),
    Rule("find peers with a model", ("+lrem", "+rpush", "+ltrim", "+lrange"), ("ff-fleet:models:*",)),
)
"""Rights of a replica: a rollout, or a trainer's rank that samples."""

RULES: Final[Mapping[str, tuple[Rule, ...]]] = {
    "controller": (
        Rule(
            "run jobs: every key of jobs and fleet, no administration of the server",
            ("+@all", "-@admin", "-@dangerous", "+info"),
            ("ff:*", "ff-fleet:*"),
            (keys.changes(),),
        ),
    ),
    "rollout": (
        _CONNECT,
        Rule("read adapters and given media", ("+get",), (_BLOBS,)),
        *_SAMPLE,
    ),
    "trainer": (
        _CONNECT,
        Rule("read samples", ("+get",), (_BLOBS,)),
        Rule(
            "publish adapters",
            ("+set", "+expire", "+unlink"),
            tuple(f"ff:*:blob:{kind}:*" for kind in ("adapter", "evaluated")),
        ),
        *_SAMPLE,
    ),
}
"""Rules by kind of service, which is the user's name."""

SENTINEL_RULE: Final = Rule(
    "ask a Sentinel for the primary", (*_CONNECT.commands, "+sentinel|masters", "+sentinel|get-master-addr-by-name")
)
"""Rights of each kind at a Sentinel. Only the operator may change anything there."""


def user_rules(kind: str, *, selectors: bool = True) -> str:
    """The rights of a kind's user in Redis's ACL language, without its password. `selectors`: for Redis 7 and later."""
    simple = [rule for rule in RULES[kind] if not (selectors and rule.keys and len(RULES[kind]) > 1)]
    words = ["resetkeys", "resetchannels", "-@all"]
    words += [word for rule in simple for word in _words(rule)]
    words += [f"({' '.join(_words(rule))})" for rule in RULES[kind] if rule not in simple]
    return " ".join(words)


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


def _words(rule: Rule) -> list[str]:
    return [*rule.commands, *(f"~{key}" for key in rule.keys), *(f"&{channel}" for channel in rule.channels)]
