"""Sessions of browsers: a random token in a cookie, and in Redis its hash with the hash of the key that opened it.

Every controller that serves REST knows a session. It ends by logout, after `SESSION_S`, and as soon as its key is
revoked. Redis never holds a token, so whoever reads Redis cannot use a session.
"""

import hashlib
import json
import secrets
from collections.abc import Collection
from dataclasses import replace
from datetime import datetime
from typing import Any

from starlette.datastructures import Headers

from flowfleet.process.clock import steady_time
from flowfleet.redis import keys
from services.controller.api.keys import Holder, Keys
from services.controller.store.records import from_epoch

COOKIE = "flowfleet_session"
SESSION_S = 24 * 3600
MAX_SESSIONS = 100
"""Sessions of one key; a further login ends the oldest."""
_TOKEN_BYTES = 32
_MAX_TOKEN = 100


class Sessions:
    """`redis` decodes no responses."""

    def __init__(self, redis: Any, keys_: Keys) -> None:
        self._redis, self._keys = redis, keys_

    async def open(self, holder: Holder) -> tuple[str, datetime]:
        """Token of a new session, and when it ends."""
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        ends = from_epoch(steady_time() + SESSION_S)
        row = json.dumps({"key": holder.digest, "ends": ends.isoformat()})
        name, logins = _name(token), keys.logins(holder.digest)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(name, row, ex=SESSION_S)
            pipe.lpush(logins, name)
            pipe.lrange(logins, MAX_SESSIONS, -1)
            pipe.ltrim(logins, 0, MAX_SESSIONS - 1)
            pipe.expire(logins, SESSION_S)
            _, _, oldest, _, _ = await pipe.execute()
        if oldest:
            await self._redis.unlink(*oldest)
        return token, ends

    async def find(self, token: str) -> Holder | None:
        """Returns the holder that opened a session, None once it ended or its key is revoked."""
        found = await self._row(token)
        holder = None if found is None else self._keys.by_digest(found["key"])
        return None if holder is None else replace(holder, session=_name(token))

    async def ends(self, token: str) -> datetime | None:
        found = await self._row(token)
        return None if found is None else datetime.fromisoformat(found["ends"])

    async def close(self, token: str) -> None:
        if (row := await self._row(token)) is None:
            return
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.unlink(_name(token))
            pipe.lrem(keys.logins(row["key"]), 0, _name(token))
            await pipe.execute()

    async def ended(self, holders: Collection[Holder]) -> set[Holder]:
        """Tells whose key is revoked or whose session ended."""
        known = list(holders)
        gone = {one for one in known if one.digest and self._keys.by_digest(one.digest) is None}
        asked = [one for one in known if one.session and one not in gone]
        async with self._redis.pipeline(transaction=False) as pipe:
            for one in asked:
                pipe.exists(one.session)
            found = await pipe.execute() if asked else []
        return gone | {one for one, there in zip(asked, found, strict=True) if not there}

    async def _row(self, token: str) -> dict[str, str] | None:
        row = await self._redis.get(_name(token)) if 0 < len(token) <= _MAX_TOKEN else None
        return None if row is None else json.loads(row)


def cookie_name(headers: Headers) -> str:
    """Name of the cookie at the port that the browser asked: browsers send a host's cookies to each of its ports."""
    port = headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdecimal() else COOKIE


def _name(token: str) -> str:
    return keys.session(hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest())
