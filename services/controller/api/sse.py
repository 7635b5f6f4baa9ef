"""A job's events as server-sent events, each with its id in the event stream, so that a client can resume."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from flowfleet.client.types import JobEvent
from services.controller.store.jobs import JobStore

POLL_S = 0.2
"""Polling needs no connection to Redis for each watcher, as a blocking read would."""
HEARTBEAT_S = 15.0
"""Silence after which a comment shows that the connection lives."""
RETRY_MS = 1000
PAGE = 200


async def stream(store: JobStore, job_id: str, after: str | None, closing: asyncio.Event) -> AsyncIterator[str]:
    """Events after an id (None: from the oldest kept). Ends after the job's last event, or when `closing` is set."""
    yield f"retry: {RETRY_MS}\n\n"
    spoke = time.monotonic()
    while not closing.is_set():
        ended = (await store.status(job_id)).terminal  # asked before reading: its event is then there to be read
        page = await store.events(job_id, after, PAGE)
        for event in page:
            yield _encode(event)
            after, spoke = event.id, time.monotonic()
            if event.final:
                return
        if ended and not page:
            return
        if time.monotonic() - spoke > HEARTBEAT_S:
            yield ": alive\n\n"
            spoke = time.monotonic()
        if len(page) < PAGE:
            await _pause(closing)


def _encode(event: JobEvent) -> str:
    return f"id: {event.id}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"


async def _pause(closing: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(closing.wait(), POLL_S)
