"""Server-sent events: a job's own, each with its id so that a client can resume, and all that the page shows in one."""

from collections.abc import AsyncIterator
from typing import Final

from flowfleet.process.clock import steady_time
from services.controller.api.feed import Feed, message_of
from services.controller.api.keys import Holder
from services.controller.store.records import from_epoch

HEARTBEAT_S = 15.0
"""Silence after which a comment shows that the connection lives."""
RETRY_MS = 1000
HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
ALIVE: Final = ": alive\n\n"
_RETRY: Final = f"retry: {RETRY_MS}\n\n"


async def stream(feed: Feed, holder: Holder, job_id: str, after: str | None) -> AsyncIterator[str]:
    """Events after an id (None: from the oldest kept). Ends after the job's last event, when the server closes, and
    when the caller's key is revoked."""
    yield _RETRY
    with feed.watching(holder, job_id) as watcher:
        while not watcher.why_ended:
            tail = await feed.tail(job_id, after)
            if tail.events:
                after = tail.events[-1].id
                yield tail.text
            if tail.ended:
                return
            if not tail.events and not await watcher.wait(HEARTBEAT_S):
                yield ALIVE


async def page(feed: Feed, holder: Holder, job_id: str | None, after: str | None) -> AsyncIterator[str]:
    """Streams what a page shows as it changes: jobs, the fleet, and one job's events after an id."""
    with feed.watching(holder, job_id, page=True) as watcher:
        yield _RETRY
        await feed.ready()
        yield message_of("hello", {"time": from_epoch(steady_time()).isoformat()})
        follows = job_id is not None
        while not watcher.why_ended:
            while watcher.messages:
                yield watcher.messages.popleft()
            if follows and job_id is not None:
                tail = await feed.tail(job_id, after)
                follows = not tail.ended
                if tail.events:
                    after = tail.events[-1].id
                    yield "".join(message_of("event", event.model_dump(mode="json")) for event in tail.events)
                    continue
            if not await watcher.wait(HEARTBEAT_S):
                yield ALIVE
        yield message_of("end", {"reason": watcher.why_ended})
