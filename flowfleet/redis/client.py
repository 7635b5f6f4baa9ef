"""Redis clients that outlive their server: killed and restarted within half a minute, it is only a pause.

A command is repeated while the server cannot be reached or still loads its data, so it may run twice: the reply to the
first may have been lost. Callers must not mind; duplicates of a sample are recognized by its identity.

`redis+sentinel://` finds the server by Sentinels and follows their failovers (redis_sentinel.py).

`rediss://` is TLS. FLOWFLEET_REDIS_CA names the PEM file of a private CA that signed the server's certificate, in place
of the system's CAs; the certificate must be for the host of the URL. Client certificates and more go into the URL, by
redis-py's names (`?ssl_certfile=…&ssl_keyfile=…`).
"""

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.retry
from redis.backoff import EqualJitterBackoff

from flowfleet.redis import sentinel as redis_sentinel
from flowfleet.redis.acl import JOB_USER

REDIS_CA: Final = "FLOWFLEET_REDIS_CA"
REDIS_LOGIN: Final = "FLOWFLEET_REDIS_LOGIN"
"""Names the user and password of a job's trainer, which the controller makes (flowfleet/redis/acl.py)."""
SOCKET_TIMEOUT_S: Final = 30.0
"""Longest silence of the server; a blocking read must block for less."""
CONNECT_TIMEOUT_S: Final = 5.0
MAX_CONNECTIONS: Final = 10_000
"""Connection limit of one client: each blocking read holds one, and a controller has one per job."""
_RETRIES: Final = 45  # 4 short pauses, then 0.5 to 1 s each: 22 s at least, 32 s on average
_BACKOFF_BASE_S: Final = 0.05
_BACKOFF_CAP_S: Final = 1.0
_TRANSIENT: Final = (redis.ConnectionError, redis.TimeoutError, OSError)
_FATAL: Final = (redis.AuthenticationError, redis.exceptions.AuthorizationError)


def redis_url() -> str:
    """`FLOWFLEET_REDIS_URL`, with the user and password of FLOWFLEET_REDIS_LOGIN where that is set. ValueError when it
    is unset: a URL has a password and never goes into argv."""
    url = os.environ.get("FLOWFLEET_REDIS_URL", "").strip()
    if not url:
        raise ValueError("set FLOWFLEET_REDIS_URL, e.g. redis://:password@127.0.0.1:6379/0")
    return with_login(url, os.environ.get(REDIS_LOGIN, ""))


def with_login(url: str, login: str) -> str:
    """The URL with another user and password, given as "user:password"; "" leaves it as it is."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{login}@{parts.netloc.rpartition('@')[2]}").geturl() if login else url


def connect(url: str) -> redis.asyncio.Redis:
    """Client for asyncio; replies are bytes. Nothing is sent yet. ValueError on a malformed URL."""
    settings = {"retry": _AsyncRetry(url, **_policy()), **_settings(url)}
    if url.startswith(redis_sentinel.SCHEMES):
        return redis_sentinel.parse(url).client(settings)
    return redis.asyncio.from_url(url, **settings)


def connect_sync(url: str) -> redis.Redis:
    """Client for threads; replies are bytes. Nothing is sent yet. ValueError on a malformed URL."""
    settings = {"retry": _SyncRetry(url, **_policy()), **_settings(url)}
    if url.startswith(redis_sentinel.SCHEMES):
        return redis_sentinel.parse(url).client_sync(settings)
    return redis.from_url(url, **settings)


def _policy() -> dict[str, Any]:
    """Returns the retry policy. A server that still loads its data raises a ConnectionError, so it is retried as
    well."""
    backoff = EqualJitterBackoff(cap=_BACKOFF_CAP_S, base=_BACKOFF_BASE_S)
    return {"backoff": backoff, "retries": _RETRIES, "supported_errors": _TRANSIENT}


def _settings(url: str) -> dict[str, Any]:
    ca = os.environ.get(REDIS_CA) if url.startswith("rediss") else None
    if ca and not Path(ca).is_file():
        raise ValueError(f"{REDIS_CA}={ca}: no such file; it must hold the CA of the Redis server's certificate")
    return {
        **({"ssl_ca_certs": ca} if ca else {}),
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_keepalive": True,
        "max_connections": MAX_CONNECTIONS,
    }


def _fatal(url: str) -> tuple[type[Exception], ...]:
    """Errors that do not pass. The user of a job's trainer is made again where Redis lost it, as by a restart."""
    user = urlsplit(url).netloc.rpartition("@")[0].partition(":")[0]
    return () if user.startswith(JOB_USER) else _FATAL


def _is_fatal(error: BaseException, fatal: tuple[type[Exception], ...]) -> bool:
    """Returns True if repeating the command cannot help: a wrong password, a certificate that is not trusted."""
    return isinstance(error, fatal) or isinstance(error.__context__, ssl.SSLCertVerificationError)


class _AsyncRetry(redis.asyncio.retry.Retry):
    """Retries in the outermost call only.

    A command retries, and inside it so does each reconnect; multiplied, a dead server would hold its callers for a
    quarter of an hour. Each connection has its own copy, used by one caller at a time.
    """

    _running = False

    def __init__(self, url: str, **policy: Any) -> None:
        super().__init__(**policy)
        self._fatal = _fatal(url)

    async def call_with_retry(self, do: Callable[[], Any], fail: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._running:
            return await do()

        async def failed(error: Exception, *count: int) -> None:
            if _is_fatal(error, self._fatal):
                raise error
            await fail(error, *count)

        self._running = True
        try:
            return await super().call_with_retry(do, failed, *args, **kwargs)
        finally:
            self._running = False


class _SyncRetry(redis.retry.Retry):
    """Retries of the synchronous client; see `_AsyncRetry`."""

    _running = False

    def __init__(self, url: str, **policy: Any) -> None:
        super().__init__(**policy)
        self._fatal = _fatal(url)

    def call_with_retry(self, do: Callable[[], Any], fail: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._running:
            return do()

        def failed(error: Exception, *count: int) -> None:
            if _is_fatal(error, self._fatal):
                raise error
            fail(error, *count)

        self._running = True
        try:
            return super().call_with_retry(do, failed, *args, **kwargs)
        finally:
            self._running = False
