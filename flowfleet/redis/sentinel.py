"""Redis behind Sentinels: each connection is made to the server that they call the primary.

The URL is `redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT,HOST:PORT/NAME/DB`, or `rediss+sentinel://` for TLS to
servers and Sentinels. NAME is the group that the Sentinels watch. `?sentinel_username=` and `?sentinel_password=` are
for the Sentinels, where they ask for a password; settings of TLS go by redis-py's names (`?ssl_ca_certs=…`).

So clients follow a failover: until a new primary is elected a connection fails, and the client repeats as it does for
any unreachable server.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

import redis.asyncio.sentinel
import redis.sentinel
from redis.connection import URL_QUERY_ARGUMENT_PARSERS

SCHEMES: Final = ("redis+sentinel://", "rediss+sentinel://")
PORT: Final = 26379
_PARSERS: Final[Mapping[str, Any]] = URL_QUERY_ARGUMENT_PARSERS
_ASK_TIMEOUT_S: Final = 2.0
"""Timeout after which a silent Sentinel is skipped."""


class _Following(redis.asyncio.sentinel.SentinelManagedConnection):
    """Asks for the primary each time that it connects: redis-py itself would connect to the one of before again."""

    async def connect_check_health(self, *args: Any, **kwargs: Any) -> None:
        if not self.is_connected:
            self.host, self.port = await self.connection_pool.get_master_address()
        await super().connect_check_health(*args, **kwargs)


class _FollowingTls(_Following, redis.asyncio.SSLConnection):
    pass


class _FollowingSync(redis.sentinel.SentinelManagedConnection):
    """Synchronous counterpart of `_Following`."""

    def connect_check_health(self, *args: Any, **kwargs: Any) -> None:
        if not self._sock:
            self.host, self.port = self.connection_pool.get_master_address()
        super().connect_check_health(*args, **kwargs)


class _FollowingSyncTls(_FollowingSync, redis.SSLConnection):
    pass


@dataclass(frozen=True)
class SentinelUrl:
    sentinels: tuple[tuple[str, int], ...]
    name: str
    tls: bool
    connection: dict[str, Any]
    """Settings of connections to the servers."""
    asking: dict[str, Any]
    """Settings of connections to the Sentinels."""

    def client(self, settings: dict[str, Any]) -> redis.asyncio.Redis:
        """Client for asyncio. `settings` apply to the connections to the servers."""
        asked: Any = redis.asyncio.sentinel.Sentinel(self.sentinels, sentinel_kwargs=self._asking(settings))  # type: ignore[no-untyped-call]
        kind = _FollowingTls if self.tls else _Following
        client: redis.asyncio.Redis = asked.master_for(
            self.name, **(settings | self.connection | {"connection_class": kind})
        )
        return client

    def client_sync(self, settings: dict[str, Any]) -> redis.Redis:
        """Client for threads."""
        asked: Any = redis.sentinel.Sentinel(list(self.sentinels), sentinel_kwargs=self._asking(settings))  # type: ignore[no-untyped-call]
        kind = _FollowingSyncTls if self.tls else _FollowingSync
        client: redis.Redis = asked.master_for(self.name, **(settings | self.connection | {"connection_class": kind}))
        return client

    def _asking(self, settings: dict[str, Any]) -> dict[str, Any]:
        trust = {name: value for name, value in (settings | self.connection).items() if name.startswith("ssl_")}
        return {"socket_timeout": _ASK_TIMEOUT_S, "protocol": 2, **trust, **self.asking}


def parse(url: str) -> SentinelUrl:
    """Raises ValueError for a malformed URL, without its password."""
    parts = urlsplit(url)
    user, _, places = parts.netloc.rpartition("@")
    name, _, db = parts.path.strip("/").partition("/")
    try:
        sentinels = tuple(_place(host) for host in places.split(","))
        number = int(db or 0)
    except ValueError:
        raise ValueError(_usage(places)) from None
    if not name:
        raise ValueError(_usage(places))
    username, _, password = user.rpartition(":") if ":" in user else ("", "", user)
    tls = parts.scheme.startswith("rediss")
    connection: dict[str, Any] = {"db": number}
    connection |= {key: unquote(value) for key, value in (("username", username), ("password", password)) if value}
    asking: dict[str, Any] = {"ssl": True} if tls else {}
    for key, values in parse_qs(parts.query).items():
        if key in ("sentinel_username", "sentinel_password"):
            asking[key.removeprefix("sentinel_")] = values[-1]
        elif key.startswith("ssl_"):
            connection[key] = _PARSERS.get(key, str)(values[-1])
        else:
            raise ValueError(f"FLOWFLEET_REDIS_URL: {key} is not a setting of {parts.scheme}; leave it out")
    return SentinelUrl(sentinels, name, tls, connection, asking)


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":") if ":" in text else (text, "", str(PORT))
    if not host:
        raise ValueError
    return host, int(port)


def _usage(places: str) -> str:
    return f"FLOWFLEET_REDIS_URL ({places}): give redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/NAME/DB"
