"""Says in words why Redis does not serve, and what to change."""

from __future__ import annotations

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
)

UNREACHABLE = "Redis cannot be reached; try again"
FULL = "Redis is full: delete ended jobs (`flowfleet delete`), raise its maxmemory, or move blobs out of it"
READ_ONLY = "Redis is read-only: it is a replica; point FLOWFLEET_REDIS_URL at the primary, or wait for the failover"
CANNOT_SAVE = (
    "Redis refuses writes because it cannot save them: free its disk or repair its persistence, then try again"
)
TOO_FEW_REPLICAS = "Redis refuses writes because too few of its replicas are connected; restart them, then try again"


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
    if isinstance(error, ReadOnlyError) or "READONLY" in text or "against a read only replica" in text:
        return READ_ONLY
    if "MISCONF" in text:
        return CANNOT_SAVE
    if "NOREPLICAS" in text:
        return TOO_FEW_REPLICAS
    return None
