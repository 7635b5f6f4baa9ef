"""REST: prompt files of users, for jobs of a controller that does not see the user's files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from flowfleet.api.access import Upload
from flowfleet.errors import InvalidRequest
from flowfleet.prompts.uploads import DIGEST, NAME, place_of
from services.controller.api.dependencies import Use

SILENCE_S = 30.0
"""Longest time that a body may pause."""

router = APIRouter(prefix="/v1/uploads", tags=["uploads"])


@router.put("/{sha256}/{name}", status_code=201)
async def upload(
    sha256: Annotated[str, Path(pattern=f"^{DIGEST}$", description="Digest of the file, in hex.")],
    name: Annotated[str, Path(pattern=f"^{NAME}$", description="Its plain name, with the suffix of its format.")],
    request: Request,
    use: Use,
) -> Upload:
    """Stores a prompt file, the body, for jobs to name as `place`. Sent again it is stored once. It is deleted with the
    last job that names it, a day after it was last sent at the earliest."""
    length = request.headers.get("content-length", "0")
    await asyncio.to_thread(use.uploads.check, sha256, name, int(length[:20]) if length.isdecimal() else 0)
    size = await use.uploads.put(sha256, name, _body(request))
    return Upload(place=place_of(sha256, name), size_bytes=size)


async def _body(request: Request) -> AsyncIterator[bytes]:
    """Raises HTTPException 408 for a body that pauses for too long, and InvalidRequest for one that ends early."""
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                data = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise HTTPException(408, f"the body paused for {SILENCE_S:g} s") from None
        except ClientDisconnect:
            raise InvalidRequest("the body ended early") from None
        yield data
