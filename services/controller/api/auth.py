"""Who may speak to the REST API: holders of the API key, or without one, programs of this machine that mean it.

A loopback address alone keeps no browser out: a page of any site may send requests to it, or rename its own host to
127.0.0.1 (DNS rebinding). So without a key, requests that name another host, or come from a page of another origin,
are refused.
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from flowfleet.process.service import is_loopback
from services.controller.api.problems import problem

OPEN_PATHS = frozenset({"/healthz", "/readyz"})


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        if self._key is None:
            if not _from_this_machine(headers):
                detail = "without FLOWFLEET_API_KEY the controller answers programs of this machine only"
                return await problem(403, detail, scope["path"])(scope, receive, send)
        elif not _equal(_presented(headers), self._key):
            detail = "send the API key as X-API-Key, or as Authorization: Bearer"
            response = problem(401, detail, scope["path"], headers={"WWW-Authenticate": "Bearer"})
            return await response(scope, receive, send)
        return await self._app(scope, receive, send)


def _presented(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")


def _equal(presented: str, key: str) -> bool:
    """In constant time."""
    return hmac.compare_digest(presented.encode(), key.encode())


def _from_this_machine(headers: Headers) -> bool:
    origin = headers.get("origin")
    return _is_local(f"http://{headers.get('host', '')}") and (origin is None or _is_local(origin))


def _is_local(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False
