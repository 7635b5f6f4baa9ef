"""Explains why Redis does not serve, and what to change. Writes that must not be lost wait until it serves again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

RETRY_S = 1.0
SAFE_POLICY = "noeviction"
UNREACHABLE = "Redis cannot be reached; try again"
FULL = "Redis is full: delete ended jobs (`flowfleet delete`), raise its maxmemory, or move blobs out of it"
READ_ONLY = "Redis is read-only: it is a replica; point FLOWFLEET_REDIS_URL at the primary, or wait for the failover"
CANNOT_SAVE = (
    "Redis refuses writes because it cannot save them: free its disk or repair its persistence, then try again"
)
BUSY = "Redis runs a script that does not end: `redis-cli SCRIPT KILL`, then try again"
NO_PRIMARY = "Redis has no primary that serves: wait for the failover, or restart it"
TOO_FEW_REPLICAS = "Redis refuses writes because too few of its replicas are connected; restart them, then try again"


_READ_ONLY = ("READONLY", "against a read only replica", "UNBLOCKED")
"""The last one ends a blocking read where a primary becomes a replica."""


def unfit(info: Mapping[str, Any]) -> str:
    """Why a Redis with this INFO cannot hold what jobs need; empty where it can, or does not tell."""
    if info.get("cluster_enabled"):
        return (
            "FLOWFLEET_REDIS_URL is a Redis Cluster, where a change cannot cover the keys that belong together: use a "
            "single Redis, or one behind Sentinels (redis+sentinel://)"
        )
    policy = info.get("maxmemory_policy", SAFE_POLICY)
    if policy == SAFE_POLICY:
        return ""
    return (
        f"Redis has maxmemory-policy {policy}, by which a full memory loses samples: set it to {SAFE_POLICY}"
        f" (`redis-cli CONFIG SET maxmemory-policy {SAFE_POLICY}`, of a managed Redis in its parameters)"
    )


def trouble(error: RedisError) -> str | None:
    """The reason why Redis serves nothing or takes no writes; None for any other error, which is our own mistake."""
    text = str(error)
    if isinstance(error, AuthenticationError | AuthorizationError):
        return "Redis refuses the user or password of FLOWFLEET_REDIS_URL; correct it and restart the controller"
    if isinstance(error, BusyLoadingError):
        return "Redis is loading its data; try again"
    if isinstance(error, ConnectionError | TimeoutError):
        return UNREACHABLE
    if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in text or text.startswith("OOM "):
        return FULL
    if isinstance(error, ReadOnlyError) or any(words in text for words in _READ_ONLY):
        return READ_ONLY
    if isinstance(error, ClusterDownError):  # MASTERDOWN is one as well
        return NO_PRIMARY
    if text.startswith("BUSY "):
        return BUSY
    if "MISCONF" in text:
        return CANNOT_SAVE
    if "NOREPLICAS" in text:
        return TOO_FEW_REPLICAS
    return None


async def patiently(write: Callable[[], Awaitable[T]]) -> T:
    """Returns the result of `write`. Repeats it while Redis rejects it, so that the work behind it is not lost. Waiting
    for an unreachable Redis is the client's part."""
    while True:
        try:
            return await write()
        except RedisError as error:
            reason = trouble(error)
            if reason in (None, UNREACHABLE) or isinstance(error, AuthenticationError | AuthorizationError):
                raise
            log.warning("redis write waits: %s", reason)
            await asyncio.sleep(RETRY_S)
