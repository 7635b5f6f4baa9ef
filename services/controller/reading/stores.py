"""Objects of stores, read by the reader (process.py) through fsspec.

What a client needs from this machine it loads before the process confines itself: its modules, and of S3 also the
descriptions of services and the certificates. Its event loop runs in the main thread, because Landlock does not reach
threads that run already.
"""

import asyncio
import contextlib
import http.client
import os
import ssl
from collections.abc import Iterable
from functools import cache
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import fsspec

from services.controller.reading.places import url_origin

NO_METADATA = "AWS_EC2_METADATA_DISABLED"
"""Keeps S3's client from asking the cloud's host for the machine's own credentials."""


def load_stores(schemes: Iterable[str]) -> None:
    """Loads the clients of these schemes. Reading an object reports a client that is missing."""
    os.environ.setdefault(NO_METADATA, "true")
    if authorities := os.environ.get("SSL_CERT_FILE"):
        os.environ.setdefault("AWS_CA_BUNDLE", authorities)
    for scheme in schemes:
        with contextlib.suppress(ImportError, ValueError):
            fsspec.get_filesystem_class(scheme)
            if scheme == "s3":
                _s3()


def read_object(url: str, limit: int) -> bytes:
    """The first `limit` bytes. Raises ValueError without the store's client, FileNotFoundError, and a client's own."""
    try:
        if url.startswith("s3://"):
            return _read_s3(url, limit)
        with fsspec.open(url, "rb") as file:
            data: bytes = file.read(limit)
            return data
    except ImportError as error:  # of the store's client, which the operator installs
        raise ValueError(f"{url}: {error}") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"the store has no object {url}") from None


def _read_s3(url: str, limit: int) -> bytes:
    store, loop = _s3()
    try:
        found: bytes = loop.run_until_complete(_head(store, url, limit))
    except Exception as error:
        if type(error).__name__ == "NoCredentialsError":
            raise OSError(
                f"{url}: the reader has no credentials: give the controller FLOWFLEET_READER_AWS_ACCESS_KEY_ID and "
                "FLOWFLEET_READER_AWS_SECRET_ACCESS_KEY, or FLOWFLEET_READER_FSSPEC_S3_ANON=true for public buckets"
            ) from None
        raise
    return found


@cache
def _s3() -> tuple[Any, asyncio.AbstractEventLoop]:
    """S3's client with its session, and its event loop."""
    import certifi

    certifi.where()
    loop = asyncio.new_event_loop()
    store = fsspec.get_filesystem_class("s3")(asynchronous=True, loop=loop)
    loop.run_until_complete(store.set_session())
    return store, loop


async def _head(store: Any, url: str, limit: int) -> bytes:
    size = (await store._info(url))["size"]
    data: bytes = await store._cat_file(url, end=limit if size > limit else None)
    return data


TIMEOUT_S = 30.0
"""Limit of a connection's silence. The controller limits the whole."""
MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_SAFE = "/%:@!$&'()*+,;=~-._?"


def fetch(url: str, limit: int) -> bytes:
    """The first `limit` bytes, by GET; redirects are followed on the same origin alone. Raises FileNotFoundError for
    404 and 410, OSError for everything else but 200."""
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
