"""Guards the REST API. It serves holders of an API key and browsers with a session that a key opened. Without keys it
serves programs of this machine that mean it.

A loopback address alone keeps no browser out: a page of any site may send requests to it, or rename its own host to
127.0.0.1 (DNS rebinding). So without a key, requests that name another host, or come from a page of another origin, are
refused. A browser sends its session's cookie by itself, so a request with a cookie changes nothing unless it comes from
our own page.
"""

import re
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from redis.exceptions import RedisError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from flowfleet.api.access import Right
from flowfleet.process.service import is_loopback
from flowfleet.redis.trouble import trouble
from services.controller.api.keys import ANYONE, Holder, Keys
from services.controller.api.problems import RETRY_S, problem
from services.controller.api.sessions import cookie_name

PROBES = frozenset({"/healthz", "/readyz"})
SESSION = "/v1/session"
ATTACH = "/v1/attach"
"""Its callers prove themselves by the token of their job."""
_PAGE = re.compile(r"/|/page/.*")
_OWN_RIGHT = (
    (Right.VOTE, "POST", re.compile(r"/v1/jobs/[^/]+/votes")),
    (Right.ASK, "PUT", re.compile(r"/v1/jobs/[^/]+/votes/groups/.*")),
)
"""Rights below `steer` that a change needs, by its method and path."""
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_RANK = {right: rank for rank, right in enumerate(Right)}
_NO_KEY = (
    "send the API key (FLOWFLEET_API_KEY) as X-API-Key, or as Authorization: Bearer, or log in on the page; `flowfleet "
    "up` keeps it in secrets/ of its state directory, where only the user who started the stack can read it"
)


class Guard:
    """ASGI middleware. Handlers find who asks in the request's state, as `holder`."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        try:
            refusal = await self._refusal(scope, headers)
        except HTTPException as refused:
            refusal = problem(refused.status_code, refused.detail, scope["path"], headers=refused.headers)
        except RedisError as error:
            refusal = problem(503, trouble(error) or str(error), scope["path"], headers={"Retry-After": RETRY_S})
        return await (refusal or self._app)(scope, receive, send)

    async def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Answers who may not do what they ask; None: they may."""
        path, method = scope["path"], scope["method"]
        if not self._keys.required:
            _note(scope, ANYONE)
            detail = "without FLOWFLEET_API_KEY the controller answers programs of this machine only"
            return None if _from_this_machine(headers) else problem(403, detail, path)
        if path == ATTACH:
            return None
        key = _presented(headers)
        if not key and method not in _SAFE and not _from_our_page(headers):
            if not headers.get("cookie") and path != SESSION:
                return _unknown(path)
            return problem(403, "the request does not come from the controller's own page: send an API key", path)
        holder = await (self._keys.checked(key, address_of(scope)) if key else self._by_cookie(scope, headers))
        _note(scope, holder)
        if path == SESSION or (method in _SAFE and _PAGE.fullmatch(path)):
            return None
        if holder is None:
            return _unknown(path)
        needed = _needed(method, path)
        if _RANK[holder.may] < _RANK[needed]:
            detail = f"the key of {holder.name} may {holder.may}; this needs a key that may {needed}"
            return problem(403, detail, path)
        return None

    async def _by_cookie(self, scope: Scope, headers: Headers) -> Holder | None:
        token = session_token(headers)
        return await scope["app"].state.services.sessions.find(token) if token else None


def address_of(scope: Scope) -> str:
    """A caller's address; empty where there is none, as on a Unix socket."""
    return str((scope.get("client") or ("",))[0])


def session_token(headers: Headers) -> str:
    """The session's token; empty without one."""
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(cookie_name(headers))
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def over_tls(scope: Scope, headers: Headers) -> bool:
    """True if a browser reached the page by HTTPS, through a proxy that ends TLS as well: its Origin says so."""
    return scope["scheme"] == "https" or headers.get("origin", "").startswith("https://")


def _note(scope: Scope, holder: Holder | None) -> None:
    scope.setdefault("state", {})["holder"] = holder


def _unknown(path: str) -> Response:
    return problem(401, _NO_KEY, path, headers={"WWW-Authenticate": "Bearer"})


def _needed(method: str, path: str) -> Right:
    if method in _SAFE:
        return Right.LOOK
    own = (right for right, verb, paths in _OWN_RIGHT if verb == method and paths.fullmatch(path))
    return next(own, Right.STEER)


def _presented(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")


def _from_our_page(headers: Headers) -> bool:
    """True if a browser says that the page is of this very origin. Proxies may rename the host, but not this mark."""
    if (site := headers.get("sec-fetch-site")) is not None:
        return site == "same-origin"
    try:
        origin = urlsplit(headers.get("origin", ""))
        return bool(origin.netloc) and origin.netloc.lower() == headers.get("host", "").lower()
    except ValueError:
        return False


def _from_this_machine(headers: Headers) -> bool:
    origin = headers.get("origin")
    return _is_local(f"http://{headers.get('host', '')}") and (origin is None or _is_local(origin))


def _is_local(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False
