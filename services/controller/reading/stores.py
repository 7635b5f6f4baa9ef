"""Objects of stores, read by the reader (process.py) through fsspec.

What a client needs from this machine it loads before the process confines itself: its modules, and of S3 also the
descriptions of services and the certificates. Its event loop runs in the main thread, because Landlock does not reach
threads that run already.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from functools import cache
from typing import Any

import fsspec

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
