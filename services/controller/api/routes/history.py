"""REST: what a job left behind: events, metrics, checkpoints, samples and their pictures."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ConfigDict

from flowfleet.api.answers import Answer, FiniteOrNone
from flowfleet.api.jobs import Checkpoint, JobEvent, MetricsRow
from flowfleet.api.samples import EXTENSIONS, Purpose
from flowfleet.api.samples import Sample as StoredSample
from flowfleet.errors import InvalidRequest, NotFound
from services.controller.api import sse
from services.controller.api.dependencies import KnownJobId, Limit, Page, Services, Use, Who, callers_of
from services.controller.api.keys import Holder
from services.controller.store.credits import Trained
from services.controller.store.records import Order, SampleRecord, Validation
from services.controller.store.samples import media_ref

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["history"])

MEDIA_TYPES = frozenset(EXTENSIONS)
OTHER_MEDIA = "application/octet-stream"
EVENT_ID = {"pattern": r"^[0-9]{1,19}(-[0-9]{1,19})?$"}
"""Documented; the handler refuses others in words."""
SAMPLE_CURSOR = {"pattern": r"^([0-9]{10}/[0-9]{5}/[0-9]{5}|[0-9]{1,12})$"}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}},
    204: {"description": "The stream has ended: do not come back"},
}
MEDIA_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The picture or video",
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in sorted(MEDIA_TYPES)}
        | {OTHER_MEDIA: {"schema": {"type": "string", "format": "binary"}}},
    }
}
MAX_STEP = 10_000_000
MAX_GROUP = 99_999
MAX_SIBLINGS = 500
Number = Annotated[int, Query(ge=0, le=MAX_STEP)]


class Sample(StoredSample):
    """A finished sample, to look at."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    media: str
    """Where the picture is served, while it is kept."""


class Sibling(Answer):
    """Another sample of the group, or the sample itself."""

    index: int
    reward: FiniteOrNone
    drop_reason: str
    advantage: FiniteOrNone
    """Null where it was not trained on, or is no longer known."""
    media: str
    media_type: str


class SampleTrace(Answer):
    """Trace of one sample: its part in an update, the checkpoint that has it, and its group."""

    sample: Sample
    advantage: FiniteOrNone
    """Relative to its group, as the update had it; of pairs 1 or -1. Null where it was not trained on."""
    ratio: FiniteOrNone
    """exp of the mean change of its log-prob while the update trained on it; null where the loss has none."""
    trained_as: int | None
    """First version that was trained on it."""
    checkpoint: Checkpoint | None
    """Oldest kept checkpoint that has it."""
    group: list[Sibling]


_SHOWN = set(Sibling.model_fields) - {"advantage"}


@router.get("/events", response_model=Page[JobEvent], responses=_STREAM)
async def events(
    request: Request,
    job_id: KnownJobId,
    use: Use,
    who: Who,
    cursor: Annotated[str | None, Query(description="Id of the last event seen.", json_schema_extra=EVENT_ID)] = None,
    limit: Limit = 100,
    last_event_id: Annotated[
        str | None, Header(description="As `cursor`; it takes precedence.", json_schema_extra=EVENT_ID)
    ] = None,
) -> Page[JobEvent] | Response:
    """Pages of JSON, oldest first; with `Accept: text/event-stream` a stream that ends with the job."""
    seen, asked = _event_id(last_event_id), _event_id(cursor)
    after = seen or asked
    if "text/event-stream" in request.headers.get("accept", ""):
        return await _stream(request, job_id, use, who, after)
    items = await use.store.events.read(job_id, after, limit)
    return Page(items=items, next_cursor=items[-1].id if len(items) == limit else None)


async def _stream(request: Request, job_id: str, use: Services, who: Holder, after: str | None) -> Response:
    if after and (await use.store.jobs.status(job_id)).terminal and not await use.store.events.read(job_id, after, 1):
        return Response(status_code=204)  # tells an EventSource not to come back
    content = use.streams.counted(sse.stream(use.feed, who, job_id, after), callers_of(request, who))
    return StreamingResponse(content, media_type="text/event-stream", headers=sse.HEADERS)


@router.get("/metrics")
async def metrics(
    job_id: KnownJobId,
    use: Use,
    cursor: Annotated[int | None, Query(ge=0, le=MAX_STEP, description="Last step seen.")] = None,
    limit: Limit = 500,
) -> Page[MetricsRow]:
    """Lists metrics, a row per step, ascending."""
    items = await use.store.history.metrics(job_id, cursor, limit)
    return Page(items=items, next_cursor=str(items[-1].step) if len(items) == limit else None)


@router.get("/validations")
async def validations(job_id: KnownJobId, use: Use) -> Page[Validation]:
    """Lists validations on the held-out prompts, ascending by version."""
    return Page(items=await use.store.history.validations(job_id))


@router.get("/checkpoints")
async def checkpoints(job_id: KnownJobId, use: Use) -> Page[Checkpoint]:
    """Stored checkpoints, ascending by step."""
    return Page(items=await use.store.history.checkpoints(job_id))


@router.get("/samples")
async def samples(
    job_id: KnownJobId,
    use: Use,
    purpose: Purpose = "train",
    step: Number | None = None,
    group_from: Annotated[int | None, Query(ge=0, le=MAX_GROUP, description="First group of a step.")] = None,
    group_to: Annotated[int | None, Query(ge=0, le=MAX_GROUP, description="Group after the last one.")] = None,
    order: Annotated[Order, Query(description="best and worst go by reward.")] = "newest",
    by: Annotated[
        str, Query(max_length=200, description="Reward, or reward.component: best and worst of a step go by it.")
    ] = "",
    each: Annotated[Literal["sample", "group"], Query(description="group: one sample of each.")] = "sample",
    cursor: Annotated[str | None, Query(json_schema_extra=SAMPLE_CURSOR)] = None,
    limit: Limit = 50,
) -> Page[Sample]:
    try:
        items, following = await use.store.samples.page(
            job_id,
            purpose=purpose,
            step=step,
            groups=None if group_from is group_to is None else (group_from or 0, group_to or MAX_GROUP),
            order=order,
            by=by,
            one_a_group=each == "group",
            cursor=cursor,
            limit=limit,
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    return Page(items=[_sample(job_id, item) for item in items], next_cursor=following)


@router.get("/samples/{step}/{group}/{index}")
async def trace(
    job_id: KnownJobId, step: int, group: int, index: int, use: Use, purpose: Purpose = "train"
) -> SampleTrace:
    """Shows one sample, what it counted for, and the checkpoint that has it."""
    found = await use.store.samples.get(job_id, step, group, index, purpose)
    siblings, _ = await use.store.samples.page(
        job_id, purpose=purpose, step=step, groups=(group, group + 1), order="oldest", limit=MAX_SIBLINGS
    )
    credits = await use.store.credits.of_step(job_id, step) if purpose == "train" else {}
    own = credits.get((group, index))
    kept = [one for one in await use.store.history.checkpoints(job_id) if own and one.step > step]
    return SampleTrace(
        sample=_sample(job_id, found),
        advantage=own.advantage if own else None,
        ratio=own.ratio if own else None,
        trained_as=step + 1 if own else None,
        checkpoint=kept[0] if kept else None,
        group=[
            Sibling(**_sample(job_id, one).model_dump(include=_SHOWN), advantage=_advantage(credits, one))
            for one in siblings
        ],
    )


def _advantage(credits: Mapping[tuple[int, int], Trained], sample: SampleRecord) -> float | None:
    credit = credits.get((sample.group, sample.index))
    return credit.advantage if credit else None


@router.get("/samples/{step}/{group}/{index}/media", response_class=Response, responses=MEDIA_RESPONSES)
async def media(
    job_id: KnownJobId, step: int, group: int, index: int, use: Use, purpose: Purpose = "train"
) -> Response:
    """The bytes of the picture, video or text."""
    found = await use.store.samples.get(job_id, step, group, index, purpose)
    try:
        content = await use.blobs.get(media_ref(found))
    except NotFound:
        raise NotFound(
            f"the picture of sample {step}/{group}/{index} was deleted: after a step the newest and best "
            "schedule.keep_pictures stay, for 24 h"
        ) from None
    headers = {"Cache-Control": "private, max-age=86400", "X-Content-Type-Options": "nosniff"}
    media_type = found.media_type if found.media_type in MEDIA_TYPES else OTHER_MEDIA
    return Response(content, media_type=media_type, headers=headers)


def _sample(job_id: str, record: SampleRecord) -> Sample:
    shown = record.model_dump(exclude={"media_uri", "media_size_bytes", "media_sha256"})
    place = f"{record.step}/{record.group}/{record.index}"
    return Sample(**shown, media=f"/v1/jobs/{job_id}/samples/{place}/media?purpose={record.purpose}")


def _event_id(text: str | None) -> str | None:
    if text is not None and not re.fullmatch(EVENT_ID["pattern"], text):
        raise InvalidRequest("Last-Event-ID or cursor: give the id of an event as received, e.g. 1700000000000-0")
    return text
