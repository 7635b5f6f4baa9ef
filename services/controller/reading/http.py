"""HTTP for the reader: a GET that follows redirects on the same origin alone. Which addresses may be connected to is
decided where they are (confinement.py)."""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import quote, urljoin, urlsplit

from services.controller.reading.places import url_origin

TIMEOUT_S = 30.0
"""Limit of a connection's silence. The controller limits the whole."""
MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_SAFE = "/%:@!$&'()*+,;=~-._?"


def fetch(url: str, limit: int) -> bytes:
    """The first `limit` bytes. Raises FileNotFoundError for 404 and 410, OSError for everything else but 200."""
    origin = url_origin(url)
    for _ in range(MAX_REDIRECTS + 1):
        connection = _connection(url)
        try:
            connection.request("GET", _target(url), headers={"User-Agent": "flowfleet", "Accept-Encoding": "identity"})
            response = connection.getresponse()
            if response.status not in _REDIRECTS:
                return _body(response, url, limit)
            url = urljoin(url, response.headers.get("Location", ""))
        except http.client.HTTPException as error:
            raise OSError(f"{url} did not answer: {type(error).__name__}") from error
        finally:
            connection.close()
        try:
            there = url_origin(url)
        except ValueError as error:
            raise OSError(f"it redirects to a URL that may not be read: {error}") from None
        if there != origin:
            raise OSError(f"it redirects to {there}: name that URL in the data instead, and allow it by --data-url")
    raise OSError(f"it redirects more than {MAX_REDIRECTS} times")


def _connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme.lower() == "https":
        return http.client.HTTPSConnection(host, parts.port, timeout=TIMEOUT_S, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, parts.port, timeout=TIMEOUT_S)


def _target(url: str) -> str:
    parts = urlsplit(url)
    path = quote(parts.path or "/", safe=_SAFE)
    return path + (f"?{quote(parts.query, safe=_SAFE)}" if parts.query else "")


def _body(response: http.client.HTTPResponse, url: str, limit: int) -> bytes:
    if response.status in (404, 410):
        raise FileNotFoundError(f"{url}: {response.status} {response.reason}")
    if response.status != 200:
        raise OSError(f"{url}: {response.status} {response.reason}")
    expected = response.length
    data = response.read(limit)
    if expected is not None and len(data) < min(limit, expected):
        raise OSError(f"{url} ended after {len(data)} of {expected} bytes")
    return data
