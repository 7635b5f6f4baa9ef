"""The tables of who may do what, generated from `redis_acl` and `kinds`: for the docs, and for the chart's Redis.

python -m docs.generate.trust
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from docs.generate.markdown import rewrite, table
from flowfleet.redis import acl as redis_acl
from flowfleet.rpc import kinds

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "security.md"
CHART_USERS: Final = ROOT / "deploy" / "helm" / "flowfleet" / "files" / "redis" / "users"
CHART_SENTINEL_USERS: Final = CHART_USERS.with_name("sentinel-users")
_ANY: Final = "–"


def parts() -> dict[str, str]:
    """Name to content of each generated part of the security page."""
    return {"redis users": _redis(), "grpc callers": _callers()}


def chart_users() -> str:
    """A line a kind: its name and its rules, for Redis 7 and later."""
    return "".join(f"{kind} {redis_acl.user_rules(kind)}\n" for kind in redis_acl.RULES)


def chart_sentinel_users() -> str:
    """Users of the chart's Sentinels; compare `chart_users`."""
    return "".join(f"{kind} {redis_acl.sentinel_rules()}\n" for kind in redis_acl.RULES)


def _redis() -> str:
    rows = [
        [f"`{kind}`", rule.purpose, _code(rule.commands), _code([*rule.keys, *(f"&{name}" for name in rule.channels)])]
        for kind, rules in redis_acl.RULES.items()
        for rule in rules
    ]
    sentinel = redis_acl.SENTINEL_RULE
    rows += [[f"`{kind}`", sentinel.purpose, _code(sentinel.commands), _ANY] for kind in redis_acl.RULES]
    everything = [f"`{redis_acl.OPERATOR}`", "the operator", "`+@all`", "`*`"]
    return table(["user", "may", "commands", "keys, &channels"], [*rows, everything])


def _callers() -> str:
    rows = []
    for kind, methods in kinds.MAY_CALL.items():
        names = [method.removeprefix("/flowfleet.v1.").replace("/", ".") for method in methods]
        rows.append([f"`{kind}`", "every method" if names == ["*"] else _code(names)])
    return table(["caller", "may call"], rows)


def _code(words: tuple[str, ...] | list[str]) -> str:
    return " ".join(f"`{word}`" for word in words) or _ANY


if __name__ == "__main__":
    rewrite(PAGE, parts())
    CHART_USERS.write_text(chart_users(), encoding="utf-8")
    CHART_SENTINEL_USERS.write_text(chart_sentinel_users(), encoding="utf-8")
