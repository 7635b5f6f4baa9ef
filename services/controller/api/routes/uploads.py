"""REST: prompt files of users, for jobs of a controller that does not see the user's files."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Path, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from flowfleet.api.access import Upload
from flowfleet.errors import InvalidRequest
from flowfleet.part import rule
from flowfleet.prompts.formats import SUFFIXES
from flowfleet.prompts.uploads import DIGEST, NAME, place_of
from services.controller.api.dependencies import Use, Who

SILENCE_S = 30.0
"""Longest time that a body may pause."""
LEAST_BYTES_S = 16_384
"""Least rate of a body that takes longer than that."""
_DIGEST = rule(f"^{DIGEST}$", "give the SHA-256 as 64 hex digits")
_NAME = rule(f"^{NAME}$", f"give up to 100 letters, digits and ._-, then one of {', '.join(SUFFIXES)}")

router = APIRouter(prefix="/v1/uploads", tags=["uploads"])


@router.put("/{sha256}/{name}", status_code=201)
async def upload(
    sha256: Annotated[str, Path(pattern=_DIGEST, description="Digest of the file, in hex.")],
    name: Annotated[str, Path(pattern=_NAME, description="Its plain name, with the suffix of its format.")],
    request: Request,
    use: Use,
    who: Who,
) -> Upload:
    """Stores a prompt file, the body, for jobs to name as `place`. Sent again it is stored once. It is deleted with the
    last job that names it, a day after it was last sent at the earliest."""
    length = request.headers.get("content-length", "0")
    await asyncio.to_thread(use.uploads.check, sha256, name, int(length[:20]) if length.isdecimal() else 0)
    size = await use.uploads.put(sha256, name, _body(request), who.name)
    return Upload(place=place_of(sha256, name), size_bytes=size)


async def _body(request: Request) -> AsyncIterator[bytes]:
    """Raises HTTPException 408 for a body that pauses for too long or comes too slowly, and InvalidRequest for one that
    ends early."""
    stream = aiter(request.stream())
    waited_s, size = 0.0, 0
    while True:
        asked = time.monotonic()
        try:
            async with asyncio.timeout(SILENCE_S):
                data = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise HTTPException(408, f"the body paused for {SILENCE_S:g} s") from None
        except ClientDisconnect:
            raise InvalidRequest("the body ended early") from None
        waited_s, size = waited_s + time.monotonic() - asked, size + len(data)
        if waited_s > SILENCE_S and size < LEAST_BYTES_S * waited_s:
            raise HTTPException(408, f"the body comes at less than {LEAST_BYTES_S} bytes a second")
        yield data
