"""The state of a running job in Redis: a snapshot, and the events since. Folding both gives the state of the killed
controller.

An event is recorded before it takes effect, in one transaction with what belongs to it (references of samples, the
acknowledgment of stream entries), so nothing is acknowledged and lost. Only the controller that leads writes: a
transaction of one that another has taken over from raises LeaseLost and changes nothing.

Each write replaces the ledger's head, a number and a token of that write. A write that finds another head than its own
last one raises RolledBack and changes nothing: Redis has lost acknowledged writes, and what the driver remembers is of
another history than what Redis holds. The job then resumes from what Redis holds.
"""

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic import ValidationError

from flowfleet.errors import OtherFormat
from flowfleet.job.spec import JobSpec
from flowfleet.redis import keys
from services.controller.job.machine.events import VOLATILE, Event, event_from_json, event_to_json
from services.controller.job.machine.state import LEDGER_FORMAT, State
from services.controller.job.machine.state_machine import Machine
from services.controller.store.leadership import Lease

_OTHER = "the ledger {}: run the version of Flowfleet that wrote it, or cancel the job"

SLICE = 500
"""Events that are folded in one go. Who leads is alone to write, so what is read in slices is of one piece."""

Also = Callable[[Any], Awaitable[None]]
"""Adds commands to the transaction (a redis.asyncio pipeline) of an append."""


class RolledBack(Exception):
    """Redis lost acknowledged writes. No FlowfleetError: a command that meets it is not tried again, its driver
    ends."""


class Ledger:
    def __init__(self, redis: Any, lease: Lease, job_id: str) -> None:
        self._redis = redis
        self._lease = lease
        self._snapshot_key = keys.job_key(job_id, "state")
        self._events_key = keys.job_key(job_id, "ledger")
        self._head_key = keys.job_key(job_id, "head")
        self._head = ""

    async def restore(self, spec: JobSpec) -> Machine:
        """The machine as the last controller left it; a new one for a new job. Raises OtherFormat for a ledger of
        another version of Flowfleet."""
        try:
            return await self._fold(spec)
        except ValidationError as error:
            raise OtherFormat(_OTHER.format(f"cannot be read: {error.errors()[0]['msg']}")) from None

    async def _fold(self, spec: JobSpec) -> Machine:
        snapshot, head = await self._redis.mget(self._snapshot_key, self._head_key)
        self._head = (head or b"").decode()
        machine = Machine(spec, State.model_validate_json(snapshot) if snapshot else None)
        if (found := machine.state.format) != LEDGER_FORMAT:
            raise OtherFormat(_OTHER.format(f"has the format {found}, and this controller reads {LEDGER_FORMAT}"))
        start = 0
        while entries := await self._redis.lrange(self._events_key, start, start + SLICE - 1):
            for entry in entries:
                machine.apply(event_from_json(entry))
            start += len(entries)
        return machine

    async def append(self, events: Sequence[Event], also: Also | None = None) -> None:
        """Makes events durable, together with what `also` adds."""
        durable = [event_to_json(event) for event in events if not isinstance(event, VOLATILE)]
        if not durable and also is None:
            return

        async def fill(pipe: Any) -> None:
            if durable:
                pipe.rpush(self._events_key, *durable)
            if also is not None:
                await also(pipe)

        await self._write(fill)

    async def forget(self) -> None:
        """The job has ended, and its record says so."""
        await self._redis.delete(self._snapshot_key, self._events_key, self._head_key)

    async def snapshot(self, state: State) -> None:
        """Replaces snapshot and journal by the state."""
        text = state.without_volatile().model_dump_json()

        async def fill(pipe: Any) -> None:
            pipe.set(self._snapshot_key, text)
            pipe.delete(self._events_key)

        await self._write(fill)

    async def _write(self, fill: Callable[[Any], Awaitable[None]]) -> None:
        """Writes in one transaction, applied once: an attempt whose answer was lost finds its own head."""
        number = int(self._head.partition("-")[0] or 0) + 1
        ours = f"{number}-{secrets.token_hex(8)}"

        async def attempt(pipe: Any) -> None:
            found = (await pipe.get(self._head_key) or b"").decode()
            if found == ours:
                return
            if found != self._head:
                raise RolledBack(f"the ledger is at write {found or 'none'}, and was at {self._head or 'none'}")
            pipe.multi()
            pipe.set(self._head_key, ours)
            await fill(pipe)

        await self._lease.transaction(attempt, self._head_key)
        self._head = ours
