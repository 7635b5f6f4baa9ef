"""How both clients find their controller, and what an answer or its absence means. Sends nothing."""

import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from flowfleet.api.answers import read
from flowfleet.api.problems import ApiError, SettingProblem

URL = "FLOWFLEET_URL"
API_KEY = "FLOWFLEET_API_KEY"
CA = "FLOWFLEET_CA"
DEFAULT_URL = "http://127.0.0.1:8470"
TIMEOUT_S = 30.0
CHECKS_S = 600.0  # of all jobs of a sweep
STREAM_SILENCE_S = 60.0
"""The controller sends a sign of life more often than this while nothing happens."""
RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0)
POLL_S = 0.5
AWAY = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
PAGE_SIZE = 100


def controller_url(url: str | None = None) -> str:
    """The controller that is meant: the given URL, else FLOWFLEET_URL, else that of the stack in the working folder's
    `runs/local`, else the default of `flowfleet up`."""
    named = url or os.environ.get(URL)
    if not named:
        from flowfleet.local.stack import DEFAULT_STATE_DIR, StateDir

        stack = StateDir(DEFAULT_STATE_DIR).read()
        named = stack.url if stack else DEFAULT_URL
    return named.rstrip("/")


def place_and_key(url: str | None, api_key: str | None) -> tuple[str, str]:
    """Returns the URL of the controller that is meant and the key for it: the given one, else that of the environment,
    else that of this user's own stack there; empty for none. A stack's key goes to its own address alone, not to
    another one that `localhost` may have."""
    place = controller_url(url)
    key = (api_key or os.environ.get(API_KEY, "")).strip()
    if not key and is_loopback(place):
        from flowfleet.local.stack import stack_at

        if stack := stack_at(place.replace("//localhost:", "//127.0.0.1:")):
            return stack.url, stack.api_key
    return place, key


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def trusting(ca: Path | str | None) -> ssl.SSLContext | bool:
    """Returns httpx's `verify`: the PEM file `ca`, else that of FLOWFLEET_CA, else True for the system's CAs."""
    ca = ca or os.environ.get(CA)
    if not ca:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise ValueError(f"{ca}, given by --ca or {CA}, holds no PEM certificates ({error})") from None


def unreachable(url: str, error: httpx.TransportError) -> ApiError:
    """The ApiError that says why no controller answers there, and what to do."""
    text = str(error) or type(error).__name__
    advice = "start one with `flowfleet up`"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        advice = f"its certificate is not trusted: give the CA that signed it by --ca or {CA}"
    elif "WRONG_VERSION_NUMBER" in text:
        advice = "it speaks no TLS: use http://"
    elif isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) and url.startswith("http://"):
        advice = "if it speaks TLS, use https://"
    return ApiError(0, f"no controller answers at {url} ({text}); {advice}")


def checked(response: httpx.Response) -> httpx.Response:
    """The response itself, or the ApiError that it tells."""
    if response.is_success:
        return response
    try:
        problem = response.json()
        detail = str(problem.get("detail") or problem.get("title"))
        problems = tuple(read(SettingProblem, item) for item in problem.get("errors") or ())
    except (ValueError, AttributeError):
        detail, problems = f"{response.status_code} {response.reason_phrase}", ()
    raise ApiError(response.status_code, detail, problems)
