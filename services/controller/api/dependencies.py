"""Services that request handlers work with: made once by the app factory, handed in by FastAPI."""

import asyncio
import re
from dataclasses import dataclass, field
from typing import Annotated, Generic, TypeVar, cast

from fastapi import Depends, Query, Request
from prometheus_client import CollectorRegistry
from pydantic import AfterValidator
from redis.asyncio import Redis

from flowfleet.api.answers import Answer
from flowfleet.api.jobs import JobStatus
from flowfleet.api.rewards import Comparison
from flowfleet.api.samples import Purpose
from flowfleet.data.blobs import BlobStore
from flowfleet.errors import NotFound
from flowfleet.lru import LruCache
from flowfleet.part import rule
from services.controller.api.auth import address_of
from services.controller.api.connections import Streams
from services.controller.api.feed import Feed
from services.controller.api.keys import Holder, Keys
from services.controller.api.sessions import Sessions
from services.controller.fleet.directory import Directory
from services.controller.platforms.attach.launcher import AttachLauncher
from services.controller.ports import Scheduler
from services.controller.prompts.sources import Sources
from services.controller.prompts.uploads import Uploads
from services.controller.retention.memory import Memory
from services.controller.rewards.comparison import compare
from services.controller.settings import ControllerSettings
from services.controller.store.store import Store

Cursor = Annotated[str | None, Query(pattern=rule(r"^[0-9a-f-]{36}$", "give the next_cursor of the page before"))]
MAX_KNOWN = 256
"""Comparisons that are kept."""


class Comparisons:
    def __init__(self) -> None:
        self._known: LruCache[tuple[str, str, Purpose], tuple[tuple[int, bytes], Comparison]] = LruCache(MAX_KNOWN)

    async def of(self, store: Store, job_id: str, pair: str, purpose: Purpose) -> Comparison:
        """Compares a pair over its newest groups."""
        key, mark = (job_id, pair, purpose), await store.shadows.mark(job_id, pair, purpose)
        known = self._known.get(key)
        if known is None or known[0] != mark:
            groups = await store.shadows.scores(job_id, pair, purpose)
            known = mark, await asyncio.to_thread(compare, groups)
            self._known.put(key, known)
        return known[1]


T = TypeVar("T")
_JOB_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class Services:
    settings: ControllerSettings
    redis: Redis
    store: Store
    blobs: BlobStore
    directory: Directory
    runner: Scheduler
    sources: Sources
    registry: CollectorRegistry
    memory: Memory
    streams: Streams
    uploads: Uploads
    keys: Keys
    sessions: Sessions
    feed: Feed
    closing: asyncio.Event
    """Set when the server shuts down: open streams end."""
    launcher: AttachLauncher
    comparisons: Comparisons = field(default_factory=Comparisons)


def _services(request: Request) -> Services:
    return cast(Services, request.app.state.services)


Use = Annotated[Services, Depends(_services)]


def _holder(request: Request) -> Holder | None:
    return cast("Holder | None", request.state.holder)


MaybeHolder = Annotated[Holder | None, Depends(_holder)]
"""Caller; None for a stranger, where a call is open to strangers."""
Who = Annotated[Holder, Depends(_holder)]
"""Caller, where the guard lets no stranger in."""


def callers_of(request: Request, who: Holder) -> dict[str, str]:
    """Name and address of a caller, whose shares are limited; empty on a controller without keys, which serves its
    machine alone."""
    return {"key": who.name, "address": address_of(request.scope)} if who.name else {}


def job_id_of(job_id: str) -> str:
    """The id, if it is one. Raises NotFound."""
    if not _JOB_ID.fullmatch(job_id):
        raise NotFound(f"no job {job_id}")
    return job_id


async def _existing(job_id: Annotated[str, Depends(job_id_of)], use: Use) -> str:
    await use.store.jobs.status(job_id)
    return job_id


JobId = Annotated[str, Depends(job_id_of)]
"""Well-formed, so it can be part of a key; the store raises NotFound if there is none."""
KnownJobId = Annotated[str, Depends(_existing)]


def _known(status: JobStatus) -> JobStatus:
    if not status.known:
        raise ValueError(f"no such status: there is {', '.join(JobStatus)}")
    return status


KnownStatus = Annotated[JobStatus, AfterValidator(_known)]
Limit = Annotated[int, Query(ge=1, le=500, description="Rows of a page at most.")]


class Page(Answer, Generic[T]):
    items: list[T]
    next_cursor: str | None = None
    """Give it as `cursor` for what follows; null: nothing follows yet."""
