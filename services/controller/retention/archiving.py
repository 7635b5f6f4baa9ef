"""Copies an ended job to the operator's archive (flowfleet/client/archive.py). Doing it again writes the same files."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from flowfleet.api.samples import Purpose
from flowfleet.client.archive import Archive, media_name
from flowfleet.data.blobs import BlobStore
from flowfleet.errors import DataLoss, NotFound
from services.controller.store.records import SampleRecord
from services.controller.store.samples import media_ref
from services.controller.store.store import Store

T = TypeVar("T")

PAGE = 1000
MEDIA_AT_ONCE = 8


async def archive_job(store: Store, blobs: BlobStore, archive: Archive, job_id: str) -> str:
    """Writes history and media, and returns the folder. Raises what the archive's store raises."""
    folder = archive.folder(job_id)
    job = (await store.jobs.get(job_id)).model_copy(update={"archive": folder})
    await asyncio.to_thread(archive.write, job_id, "job.json", job.model_dump_json().encode())
    events = _following(lambda after: store.events.read(job_id, after, PAGE), lambda event: event.id)
    metrics = _following(lambda after: store.history.metrics(job_id, after, PAGE), lambda row: row.step)
    votes = _following(lambda after: store.votes.groups(job_id, after, PAGE), lambda one: (one.step, one.group))
    counts = {
        "events": await _write(archive, job_id, "events", events),
        "metrics": await _write(archive, job_id, "metrics", metrics),
        "checkpoints": await _write(archive, job_id, "checkpoints", _page(await store.history.checkpoints(job_id))),
        "rewards": await _write(archive, job_id, "rewards", _page(await store.rewards.history(job_id))),
        "votes": await _write(archive, job_id, "votes", votes),
        "samples": await _write(archive, job_id, "samples", _samples(store, job_id)),
        "media": 0,
    }
    async for page in _samples(store, job_id):
        counts["media"] += await _copy_media(blobs, archive, job_id, page)
    await asyncio.to_thread(archive.complete, job_id, counts)
    return folder


async def _write(archive: Archive, job_id: str, kind: str, pages: AsyncIterator[Sequence[BaseModel]]) -> int:
    """Writes JSON lines and returns how many."""
    lines: list[bytes] = []
    async for page in pages:
        lines += [row.model_dump_json().encode() + b"\n" for row in page]
    await asyncio.to_thread(archive.write, job_id, f"{kind}.jsonl", b"".join(lines))
    return len(lines)


async def _copy_media(blobs: BlobStore, archive: Archive, job_id: str, samples: Sequence[SampleRecord]) -> int:
    """Copies what is still kept and returns how many."""
    turn = asyncio.Semaphore(MEDIA_AT_ONCE)

    async def copy(sample: SampleRecord) -> int:
        async with turn:
            try:
                data = await blobs.get(media_ref(sample))
            except (NotFound, DataLoss, ValueError):  # ValueError: it is in a store that was configured before
                return 0
            place = (sample.purpose, sample.step, sample.group, sample.index, sample.media_type)
            await asyncio.to_thread(archive.write, job_id, media_name(*place), data)
            return 1

    return sum(await asyncio.gather(*(copy(sample) for sample in samples if sample.media_uri)))


async def _page(rows: Sequence[BaseModel]) -> AsyncIterator[Sequence[BaseModel]]:
    yield rows


async def _following(
    read: Callable[[Any], Awaitable[Sequence[T]]], place: Callable[[T], object]
) -> AsyncIterator[Sequence[T]]:
    """Reads all pages of rows, each read after the place of the last row before it."""
    after = None
    while page := await read(after):
        yield page
        after = place(page[-1])


async def _samples(store: Store, job_id: str) -> AsyncIterator[Sequence[SampleRecord]]:
    purposes: tuple[Purpose, ...] = ("train", "validate")
    for purpose in purposes:
        cursor: str | None = None
        while True:
            page, cursor = await store.samples.page(job_id, purpose=purpose, order="oldest", cursor=cursor, limit=PAGE)
            yield page
            if cursor is None:
                break
