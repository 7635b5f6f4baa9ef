"""REST: what the page shows first, jobs in a row each, and the one stream that tells it of every change."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from flowfleet.api.jobs import JobStatus
from flowfleet.api.overview import JobRow
from services.controller.api import sse
from services.controller.api.dependencies import (
    Cursor,
    KnownStatus,
    Limit,
    Page,
    Services,
    Use,
    Who,
    callers_of,
    job_id_of,
)

router = APIRouter(prefix="/v1", tags=["page"])

MAX_TEXT = 100
BATCH = 500
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


@router.get("/overview")
async def overview(
    use: Use,
    cursor: Cursor = None,
    limit: Limit = 500,
    status: KnownStatus | None = None,
    text: Annotated[str, Query(max_length=MAX_TEXT, description="Part of a name, an id, an owner or a pool.")] = "",
    sweep: Annotated[str, Query(max_length=MAX_TEXT, description="Name of a sweep: only its jobs.")] = "",
) -> Page[JobRow]:
    """Rows of jobs, newest first."""
    waiting = await use.feed.waiting()
    found: list[JobRow] = []
    while len(found) <= limit and (ids := await use.store.lists.ids(cursor, BATCH)):
        rows = [row for row in await use.feed.rows(ids) if not sweep or (row.sweep and row.sweep.name == sweep)]
        found += [waiting.get(row.id, row) for row in rows if _fits(row, status, text.strip().lower())]
        cursor = ids[-1]
    return Page(items=found[:limit], next_cursor=found[limit - 1].id if len(found) > limit else None)


@router.get("/stream", response_class=Response, responses=_STREAM)
async def stream(
    request: Request,
    use: Use,
    who: Who,
    job: Annotated[str | None, Query(description="The job whose events come too.")] = None,
) -> Response:
    """Server-sent events: `hello`, `jobs`, `fleet`, `event`, `reset`, and `end`."""
    after = None if job is None else await _newest(use, job_id_of(job))
    content = use.streams.counted(sse.page(use.feed, who, job, after), callers_of(request, who))
    return StreamingResponse(content, media_type="text/event-stream", headers=sse.HEADERS)


async def _newest(use: Services, job_id: str) -> str:
    await use.store.jobs.status(job_id)
    return await use.store.events.last_id(job_id)


def _fits(row: JobRow, status: JobStatus | None, text: str) -> bool:
    named = not text or any(text in part.lower() for part in (row.name, row.id, row.owner, row.pool))
    return named and status in (None, row.status)
