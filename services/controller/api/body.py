"""Reads a JSON body from someone who may be careless or hostile: bounded in size, depth and number of values."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NoReturn

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from flowfleet.errors import InvalidRequest, TooLarge
from flowfleet.text_files import unique

MAX_BYTES = 1 << 20
TIMEOUT_S = 30.0
MAX_DEPTH = 32
MAX_VALUES = 5000
"""A job has about a hundred."""
MAX_TEXT = 65_536
"""Characters of a text; longer ones go into files."""


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object.

    Raises HTTPException 415 for another content type and 408 for a body that does not come, TooLarge beyond the limit
    (also without Content-Length), InvalidRequest for what is no JSON object.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, "send the job as JSON with Content-Type: application/json")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            body = await _read(request)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise InvalidRequest("the body ended early") from None
    value = _parse(body)
    if not isinstance(value, dict):
        raise InvalidRequest(f"a job is a JSON object of settings, not {type(value).__name__}")
    _check_shape(value)
    _check_text(value)
    return value


async def _read(request: Request) -> bytes:
    length = request.headers.get("content-length", "0")
    body = bytearray()
    if not length.isdecimal() or int(length[:20]) <= MAX_BYTES:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BYTES:
                break
        else:
            return bytes(body)
    raise TooLarge(f"a request body has at most {MAX_BYTES} bytes; prompts go into the file that data.train names")


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body.decode(), parse_constant=_refuse_constant, object_pairs_hook=unique)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, numbers of too many digits are ValueErrors
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_shape(root: Any) -> None:
    """Breadth first, so that its own depth is bounded."""
    level, count = [root], 0
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        count += len(level)
        if count > MAX_VALUES:
            raise InvalidRequest(f"the body holds more than {MAX_VALUES} values; a job has about a hundred")
        if not level:
            return
    raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels")


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest("the body holds half of a surrogate pair, which is not a character") from None
    for text in _texts(value):
        if len(text) > MAX_TEXT or "\0" in text:
            what = "a character NUL" if "\0" in text else f"more than {MAX_TEXT} characters"
            raise InvalidRequest(
                f"the body holds a text with {what}, which begins {text[:40]!r}: shorten or correct it"
            )


def _texts(value: Any) -> Iterator[str]:
    """Lists all texts of a body whose depth is bounded, names too."""
    if isinstance(value, str):
        yield value
    for child in _children(value):
        yield from _texts(child)
    if isinstance(value, dict):
        yield from value


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
