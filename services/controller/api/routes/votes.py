"""REST: people's votes on pairs of a group: who wants them, which pair is next, a vote, and what votes come to."""

import json
import random
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError

from flowfleet.api.votes import (
    VOTER,
    Asked,
    Ballot,
    Preference,
    Vote,
    VoteGroup,
    VotePair,
    VoteQueue,
    VoteReport,
    VoteSide,
    counted,
)
from flowfleet.data.blobs import BlobStore
from flowfleet.errors import Conflict, InvalidRequest, NotFound
from flowfleet.part import in_words, rule
from flowfleet.proto.common_pb2 import BlobRef
from services.controller.api.body import read_object
from services.controller.api.dependencies import KnownJobId, Limit, MaybeHolder, Page, Services, Use
from services.controller.api.keys import OPERATOR, Holder
from services.controller.api.routes.history import MEDIA_RESPONSES, MEDIA_TYPES, OTHER_MEDIA
from services.controller.rewards.composition import weight_at
from services.controller.store.records import from_epoch, reward_set
from services.controller.store.sample_refs import SampleRefs
from services.controller.store.samples import media_ref
from services.controller.votes.pairing import Shown, lacking, next_pairs, preferred
from services.controller.votes.report import Scores, report

router = APIRouter(prefix="/v1/jobs/{job_id}/votes", tags=["votes"])

ASKED_FOR = timedelta(minutes=15)
"""A group is shown while its votes were asked for within this time: a reward that waits asks every 30 s."""
SHOWN_FOR = timedelta(hours=12)
"""Pairs of complete groups come again for so long: later their pictures may be gone."""
NUM_COMPLETE = 8
"""Complete groups that a pair may come again from, drawn for each request."""
MAX_REPORTED = 1024
"""Newest groups that a report covers."""
SCORER = "human"
"""Name in Describe of the reward that votes are for; its own scores are not compared with votes."""
CURSOR = rule(r"^[0-9]{1,10}/[0-9]{1,10}$", "give STEP/GROUP")
_PREFERENCES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-ndjson": {}}}}
B = TypeVar("B", bound=BaseModel)

VoterName = Annotated[str, Query(pattern=VOTER, description="Who votes; needed where the key names no person.")]


@router.put("/groups/{step}/{group}")
async def ask(request: Request, job_id: KnownJobId, step: int, group: int, use: Use) -> VoteGroup:
    """Asks people for votes on samples of a group, and answers the votes so far. Asked again it changes nothing."""
    asked = await _read(request, Asked)
    if (await use.store.jobs.status(job_id)).terminal:
        raise Conflict("the job has ended and waits for no votes")
    indices = [sample.index for sample in asked.samples]
    if len(set(indices)) < len(indices):
        raise InvalidRequest("samples: give each index once")
    refs = SampleRefs(use.redis, use.blobs, job_id)
    for index in indices:
        if await refs.find(step, group, index) is None:
            raise NotFound(f"job {job_id} has no sample {step}/{group}/{index} that waits for its scores")
    return await use.store.votes.ask(job_id, step, group, asked)


@router.get("/groups/{step}/{group}/{index}/media", response_class=Response, responses=MEDIA_RESPONSES)
async def media(job_id: KnownJobId, step: int, group: int, index: int, use: Use) -> Response:
    """The picture or video, also before it has a score."""
    found = await SampleRefs(use.redis, use.blobs, job_id).find(step, group, index)
    if found is None:
        record = await use.store.samples.get(job_id, step, group, index)
        return await _media(use.blobs, media_ref(record), record.media_type)
    return await _media(use.blobs, found.media, found.media_type)


@router.get("/next")
async def next_votes(
    job_id: KnownJobId,
    use: Use,
    holder: MaybeHolder,
    voter: VoterName = "",
    count: Annotated[int, Query(ge=1, le=20, description="Pairs at most, the first to show first.")] = 4,
) -> VoteQueue:
    """Pairs for a voter. Now and then one comes again."""
    name = _voter(holder, voter)
    waiting = await _asked_within(use, ASKED_FOR, await use.store.votes.waiting(job_id))
    ended = await _asked_within(use, SHOWN_FOR, await use.store.votes.some_complete(job_id, NUM_COMPLETE))
    pairs = next_pairs(waiting, ended, name, count, random.Random()) if waiting else []
    given = sum(vote.voter == name for group in waiting for vote in counted(group.votes))
    wanted = sum(map(lacking, waiting))
    return VoteQueue(pairs=[_pair(job_id, shown) for shown in pairs], waiting=wanted, given=given)


@router.post("", status_code=201)
async def vote(request: Request, job_id: KnownJobId, use: Use, holder: MaybeHolder) -> Vote:
    """Records a vote. The same id again counts once."""
    ballot = await _read(request, Ballot)
    named = ballot.model_copy(update={"voter": _voter(holder, ballot.voter)})
    return await use.store.votes.vote(job_id, named)


@router.get("")
async def votes(
    job_id: KnownJobId,
    use: Use,
    cursor: Annotated[str | None, Query(pattern=CURSOR, description="STEP/GROUP of the last group seen.")] = None,
    limit: Limit = 100,
) -> Page[VoteGroup]:
    """Groups with their votes, by step and group."""
    step, _, group = (cursor or "").partition("/")
    items = await use.store.votes.groups(job_id, (int(step), int(group)) if cursor else None, limit)
    last = f"{items[-1].step}/{items[-1].group}" if len(items) == limit else None
    return Page(items=items, next_cursor=last)


@router.get("/preferences", response_class=StreamingResponse, responses=_PREFERENCES)
async def preferences(job_id: KnownJobId, use: Use) -> StreamingResponse:
    """A line of JSON for each pair that most votes decide, in the columns of a preference file; media are paths of
    this API."""
    return StreamingResponse(_preferences(use, job_id), media_type="application/x-ndjson")


@router.get("/report")
async def show_report(job_id: KnownJobId, use: Use) -> VoteReport:
    """How far voters agree with themselves, with one another and with the job's other rewards."""
    groups = await use.store.votes.newest(job_id, MAX_REPORTED)
    scores, theirs = await _scores(use, job_id, groups)
    record = await use.store.jobs.get(job_id)
    spec, active = record.job_spec(), reward_set(record.rewards.active).rewards
    others = [part for name, part in active.items() if name not in theirs and part.service_of(name) != SCORER]
    guards = [part for part in others if part.gate is not None or weight_at(part, record.progress.step)]
    return report(groups, scores, guarded=bool(guards) or spec.kl.kl_coef > 0)


async def _scores(use: Services, job_id: str, groups: Sequence[VoteGroup]) -> tuple[Scores, set[str]]:
    """Scores of the rewards other than the votes, and the names of the rewards that are the votes."""
    places = [(one.step, one.group, sample.index) for one in groups for sample in one.samples]
    records = await use.store.samples.find(job_id, places)
    theirs = {name for one in records for name, version in one.versions.items() if version.split()[:1] == [SCORER]}
    return {
        (one.step, one.group, one.index): {name: one.scores.get(name) for name in one.versions if name not in theirs}
        for one in records
    }, theirs


async def _preferences(use: Services, job_id: str) -> AsyncIterator[str]:
    after = None
    while groups := await use.store.votes.groups(job_id, after, 100):
        for one in groups:
            kinds = {sample.index: sample.media_type for sample in one.samples}
            for better, worse, margin in preferred(one):
                sides = {"chosen": better, "rejected": worse}
                shown = {name: _side(job_id, one, index, kinds.get(index, "")) for name, index in sides.items()}
                row = Preference(step=one.step, group=one.group, prompt=one.prompt, votes=margin, **shown)
                yield json.dumps(row.model_dump(mode="json")) + "\n"
        after = (groups[-1].step, groups[-1].group)


async def _media(blobs: BlobStore, ref: BlobRef, kind: str) -> Response:
    try:
        content = await blobs.get(ref)
    except NotFound:
        raise NotFound("the picture of this sample was deleted") from None
    headers = {"Cache-Control": "private, max-age=86400", "X-Content-Type-Options": "nosniff"}
    return Response(content, media_type=kind if kind in MEDIA_TYPES else OTHER_MEDIA, headers=headers)


async def _asked_within(use: Use, time: timedelta, groups: Sequence[VoteGroup]) -> list[VoteGroup]:
    oldest = from_epoch(await use.store.link.now()) - time
    return [one for one in groups if one.asked_at > oldest]


async def _read(request: Request, kind: type[B]) -> B:
    try:
        return kind.model_validate(await read_object(request), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InvalidRequest(f"{'.'.join(map(str, first['loc']))}: {in_words(first)}") from None


def _voter(holder: Holder | None, given: str) -> str:
    """The key's name; what is given counts only where the key names no person."""
    if holder is not None and holder.name not in ("", OPERATOR):
        return holder.name
    return given or OPERATOR


def _pair(job_id: str, shown: Shown) -> VotePair:
    group = shown.group
    kinds = {sample.index: sample.media_type for sample in group.samples}
    left, right = (_side(job_id, group, index, kinds.get(index, "")) for index in (shown.left, shown.right))
    return VotePair(step=group.step, group=group.group, prompt=group.prompt, left=left, right=right)


def _side(job_id: str, group: VoteGroup, index: int, kind: str) -> VoteSide:
    place = f"/v1/jobs/{job_id}/votes/groups/{group.step}/{group.group}/{index}/media"
    return VoteSide(index=index, media=place, media_type=kind)
