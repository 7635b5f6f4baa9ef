"""Reads changes once for all open streams: waits for the fleet's notices (store/events.py), reads what changed, and
hands it to every stream. While nothing changes it does nothing, however many streams are open.

    notices ──► rows of the jobs that changed ──► every page
            └─► wakes the streams of a job ──► tail(), one read for all that are as far
    fleet, every LOOK_S while a page is open ──► every page
    sessions and keys, every CHECK_S ──► streams of those that ended
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from flowfleet.api.jobs import JobEvent
from flowfleet.api.overview import JobRow
from flowfleet.errors import Gone, NotFound
from flowfleet.lru import LruCache
from services.controller.api.keys import Holder
from services.controller.api.sessions import Sessions
from services.controller.concurrency import wait
from services.controller.jobs.queue import placed
from services.controller.store.store import Store

log = logging.getLogger(__name__)

LOOK_S = 2.0
CHECK_S = 5.0
FORGET_S = 60.0
REST_S = 0.3
"""From one handing out to the next: changes meanwhile go together."""
RETRY_S = 1.0
READY_S = 5.0
PAGE = 200
MAX_ROWS = 5000
MAX_QUEUED = 64
"""Messages that wait for a slow page; beyond it the page starts over."""
CLOSING = "closing"
SESSION = "session"


class Tail(NamedTuple):
    """Events of a job that follow a known one."""

    events: Sequence[JobEvent]
    text: str
    """The events as a job's own stream sends them."""
    ended: bool
    """The job has ended, and `events` is all that follows."""


class Watcher:
    """Open stream of a client. `job_id`: job whose events it shows; `page`: it shows jobs and fleet."""

    def __init__(self, holder: Holder, job_id: str | None, page: bool) -> None:
        self.holder, self.job_id, self.page = holder, job_id, page
        self.messages: deque[str] = deque()
        self.why_ended = ""
        self._ring = asyncio.Event()

    def ring(self) -> None:
        self._ring.set()

    def send(self, message: str) -> None:
        if len(self.messages) >= MAX_QUEUED:
            self.messages.clear()
            message = message_of("reset", {})
        self.messages.append(message)
        self.ring()

    def end(self, why: str) -> None:
        self.why_ended = why
        self.ring()

    async def wait(self, timeout_s: float) -> bool:
        """Returns True once something has happened since the last call, False after this time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ring.wait()
        except TimeoutError:
            return False
        self._ring.clear()
        return True


class Feed:
    """`look` gives something that is equal as long as the fleet is as it was."""

    def __init__(self, store: Store, sessions: Sessions, look: Callable[[], object], closing: asyncio.Event) -> None:
        self._store, self._sessions, self._look, self._closing = store, sessions, look, closing
        self._watchers: set[Watcher] = set()
        self._wanted, self._ready = asyncio.Event(), asyncio.Event()
        self._after = ""
        """Notice that was read last; empty while nothing is read, and so nothing remembered."""
        self._rows: LruCache[str, JobRow] = LruCache(MAX_ROWS)
        self._tails: dict[tuple[str, str | None], asyncio.Task[Tail]] = {}
        self._told: dict[str, JobRow] = {}
        """Jobs that have not ended, as pages know them."""
        self._fleet: object = None
        self._number = 0
        """How often changes were handed out."""
        self._checked = self._looked = self._forgot = float("-inf")

    def tasks(self) -> list[asyncio.Task[None]]:
        """Starts what reads, and what ends all streams when the server closes; the caller ends them."""
        return [asyncio.create_task(part(), name=part.__qualname__) for part in (self._read, self._end_at_closing)]

    @contextmanager
    def watching(self, holder: Holder, job_id: str | None = None, *, page: bool = False) -> Iterator[Watcher]:
        watcher = Watcher(holder, job_id, page)
        self._watchers.add(watcher)
        self._wanted.set()
        if self._closing.is_set():
            watcher.end(CLOSING)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    async def ready(self) -> None:
        """Returns once a page that reads everything now misses no change, or after a while without Redis."""
        await wait(self._ready, READY_S)

    async def tail(self, job_id: str, after: str | None) -> Tail:
        """Returns the events after one (None: from the oldest kept). Streams that ask for the same share one read."""
        key = (job_id, after)
        if (task := self._tails.get(key)) is None:
            self._tails[key] = task = asyncio.create_task(self._read_tail(job_id, after), name="tail of events")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)

    async def rows(self, job_ids: Sequence[str]) -> list[JobRow]:
        """Rows of these jobs, in order; of those that have not ended with place and reason as of the last reading."""
        known = {job_id: self._rows.get(job_id) for job_id in job_ids}
        number = self._number
        for row in await self._store.lists.rows([job_id for job_id, row in known.items() if row is None]):
            known[row.id] = row
            if self._after and number == self._number:  # else it may have changed since it was read
                self._rows.put(row.id, row)
        return [row for row in known.values() if row is not None]

    async def waiting(self) -> dict[str, JobRow]:
        """Rows of all jobs that have not ended, with their places."""
        return {row.id: row for row in placed(await self.rows(await self._store.jobs.active()), time.time())}

    # -- the reader --------------------------------------------------------------------------------------------

    async def _end_at_closing(self) -> None:
        await self._closing.wait()
        for watcher in self._watchers:
            watcher.end(CLOSING)

    async def _read(self) -> None:
        while True:
            if not self._watchers:
                self._start_over()
                self._wanted.clear()
                await self._wanted.wait()
            try:
                await self._read_once()
            except RedisError as error:
                log.warning("changes cannot be read, trying again: %s", error)
                self._start_over()
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(REST_S)

    async def _read_once(self) -> None:
        if not self._after:
            self._after = await self._store.notices.last()
            self._ready.set()
            for watcher in self._watchers:  # what came before that notice they read now
                watcher.ring()
        found = await self._store.notices.after(self._after, LOOK_S if self._pages else CHECK_S)
        self._after = found[-1][0] if found else self._after
        await self._hand_out(dict.fromkeys(job_id for _, job_id in found))
        await self._check()

    @property
    def _pages(self) -> list[Watcher]:
        return [watcher for watcher in self._watchers if watcher.page]

    def _start_over(self) -> None:
        """Forgets what was read, and has all who watch read again."""
        self._after = ""
        self._ready.clear()
        self._rows = LruCache(MAX_ROWS)
        self._tails.clear()
        self._told.clear()
        for watcher in self._watchers:
            if watcher.page:
                watcher.send(message_of("reset", {}))
            watcher.ring()

    async def _hand_out(self, changed: dict[str, None]) -> None:
        self._number += 1
        self._tails.clear()
        for job_id in changed:
            self._rows.pop(job_id)
        if time.monotonic() - self._forgot > FORGET_S:  # a controller of an earlier release gives no notice
            self._rows, self._forgot = LruCache(MAX_ROWS), time.monotonic()
        for watcher in self._watchers:
            if watcher.job_id in changed:
                watcher.ring()
        if changed and self._pages:
            await self._tell_pages(changed)
        if self._pages and time.monotonic() - self._looked >= LOOK_S:
            self._tell_fleet()

    async def _tell_pages(self, changed: dict[str, None]) -> None:
        """Tells of the jobs that changed, and of those whose place did."""
        ended = {row.id: row for row in await self.rows(list(changed))}
        active = await self.waiting()
        moved = [row for row in active.values() if row != self._told.get(row.id)] if self._told else []
        told = {**{row.id: row for row in moved}, **ended, **{i: active[i] for i in changed if i in active}}
        self._told = active
        gone = [job_id for job_id in changed if job_id not in told]
        items = [row.model_dump(mode="json") for row in told.values()]
        self._send(message_of("jobs", {"items": items, "gone": gone}))

    def _tell_fleet(self) -> None:
        self._looked = time.monotonic()
        if (seen := self._look()) != self._fleet:
            self._fleet = seen
            self._send(message_of("fleet", {}))

    def _send(self, message: str) -> None:
        for watcher in self._pages:
            watcher.send(message)

    async def _check(self) -> None:
        """Ends the streams of those whose session ended or whose key is revoked."""
        if not self._watchers or time.monotonic() - self._checked < CHECK_S:
            return
        self._checked = time.monotonic()
        gone = await self._sessions.ended({watcher.holder for watcher in self._watchers})
        for watcher in self._watchers:
            if watcher.holder in gone:
                watcher.end(SESSION)

    async def _read_tail(self, job_id: str, after: str | None) -> Tail:
        try:
            ended = (await self._store.jobs.status(job_id)).terminal  # asked first: its event is then there to be read
        except (NotFound, Gone):
            return Tail((), "", True)
        events = await self._store.events.read(job_id, after, PAGE)
        final = any(event.final for event in events)
        return Tail(events, "".join(map(event_text, events)), final or (ended and not events))


def message_of(type: str, data: Any) -> str:
    """A message of a page's stream."""
    return f"event: {type}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n"


def event_text(event: JobEvent) -> str:
    """An event of a job's own stream, with its id, so that a client can resume."""
    return f"id: {event.id}\nevent: {event.type}\ndata: {event.model_dump_json()}\n\n"
