"""The stream of finished samples: rollouts publish, the controller consumes.

An entry carries references only, at most 16 KiB. The consumer acknowledges an entry after its effect is stored, best
in the same MULTI; until then it stays pending and comes back through `reclaim`, so an entry is handled at least once
and never lost. What cannot be decoded, or was delivered more than five times, moves to the dead-letter stream with its
reason. `trim` removes only what every group has acknowledged: a trimmed undelivered entry would be lost, and would
turn the group's lag into NULL, which a scaler reads as 0. A consumer trims after every `TRIM_EVERY` entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis.asyncio
from google.protobuf.message import DecodeError
from redis.asyncio.client import Pipeline
from redis.exceptions import ResponseError

from flowfleet.proto.common_pb2 import Sample
from flowfleet.redis import keys

MAX_ENTRY_BYTES: Final = 16 * 1024
TRIM_EVERY: Final = 1000
"""Handled entries that a stream may keep: 16 MiB at most, 1 MB as a rule."""
MAX_DEAD: Final = 10_000
"""Dead letters of a job; beyond them the oldest go."""
MAX_BLOCK_MS: Final = 20_000  # below the client's socket timeout
_FIELD: Final = b"sample"


@dataclass(frozen=True)
class Delivery:
    """An entry handed to this consumer; it must acknowledge it."""

    entry_id: str
    sample: Sample
    deliveries: int
    """How often it was handed out, this time included."""


class TrajectoryStream:
    """The producer's side."""

    def __init__(self, client: redis.asyncio.Redis, job_id: str) -> None:
        self._redis = client
        self._key = keys.trajectories(job_id)

    async def publish(self, sample: Sample) -> str:
        """Appends a sample and returns the entry's id. Repeating it is harmless. ValueError over 16 KiB."""
        data = sample.SerializeToString()
        if len(data) > MAX_ENTRY_BYTES:
            raise ValueError(
                f"a sample of {len(data)} bytes exceeds the {MAX_ENTRY_BYTES} of a stream entry: "
                "put tensors and media into blobs and carry references"
            )
        return _text(await self._redis.xadd(self._key, {_FIELD: data}))


class TrajectoryConsumer:
    """Consumer of a group. The group is created at the stream's start, so nothing published before it is missed."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        job_id: str,
        *,
        consumer: str,
        group: str = "controller",
        reclaim_idle_ms: int = 60_000,
        max_deliveries: int = 5,
    ) -> None:
        self._redis = client
        self._key = keys.trajectories(job_id)
        self._dead_key = keys.dead_trajectories(job_id)
        self._group = group
        self._consumer = consumer
        self._reclaim_idle_ms = reclaim_idle_ms
        self._max_deliveries = max_deliveries
        self._has_group = False
        self._handled = TRIM_EVERY
        """Entries since the last trim; a consumer begins with one."""

    async def read(self, count: int, block_ms: int) -> list[Delivery]:
        """New entries, at most `count`; waits up to `block_ms` (1 to 20,000) for the first. Empty when none came."""
        if not 1 <= block_ms <= MAX_BLOCK_MS:
            raise ValueError(f"block_ms = {block_ms} must lie between 1 and {MAX_BLOCK_MS}")
        await self._ensure_group()
        if self._handled >= TRIM_EVERY:
            await self.trim()
        try:
            streams: Any = await self._redis.xreadgroup(
                self._group, self._consumer, {self._key: ">"}, count=count, block=block_ms
            )
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            self._has_group = False  # the stream was deleted; the next read creates it again
            return []
        entries = streams[0][1] if streams else []
        return await self._decoded([(_text(entry_id), fields, 1) for entry_id, fields in entries])

    async def reclaim(self, count: int = 100, *, min_idle_ms: int | None = None) -> list[Delivery]:
        """Takes over entries that were delivered, to anyone, and not acknowledged for `reclaim_idle_ms`.

        A controller that starts passes `min_idle_ms=0` to get what its dead predecessor held. Entries delivered too
        often are dead-lettered instead, entries that no longer exist are acknowledged.
        """
        await self._ensure_group()
        idle = self._reclaim_idle_ms if min_idle_ms is None else min_idle_ms
        pending: Any = await self._redis.xpending_range(
            self._key, self._group, min="-", max="+", count=count, idle=idle
        )
        if not pending:
            return []
        times = {_text(item["message_id"]): int(item["times_delivered"]) + 1 for item in pending}
        claimed: Any = await self._redis.xclaim(self._key, self._group, self._consumer, idle, list(times))
        present = {_text(entry_id): fields for entry_id, fields in claimed if entry_id is not None}
        await self._acknowledge_missing(set(times) - set(present))
        worn = [entry_id for entry_id in present if times[entry_id] > self._max_deliveries]
        for entry_id in worn:
            reason = f"delivered {times[entry_id] - 1} times without being acknowledged"
            await self._dead_letter(entry_id, present.pop(entry_id), reason)
        return await self._decoded([(entry_id, fields, times[entry_id]) for entry_id, fields in present.items()])

    async def ack(self, entry_ids: Sequence[str], pipe: Pipeline | None = None) -> None:
        """Acknowledges, now or as part of the caller's pipeline (its MULTI, with the effect)."""
        self._handled += len(entry_ids)
        if entry_ids:
            await_or_queue = (pipe or self._redis).xack(self._key, self._group, *entry_ids)
            if pipe is None:
                await await_or_queue

    async def bury(self, delivery: Delivery, reason: str) -> None:
        """Moves an entry to the dead-letter stream and acknowledges it, in one transaction."""
        await self._dead_letter(delivery.entry_id, {_FIELD: delivery.sample.SerializeToString()}, reason)

    async def trim(self) -> int:
        """Removes entries that every group has acknowledged; returns how many."""
        self._handled = 0
        floors = [await self._floor(group) for group in await self._groups()]
        return (
            int(await self._redis.xtrim(self._key, minid=min(floors, key=_order), approximate=False)) if floors else 0
        )

    async def _ensure_group(self) -> None:
        if self._has_group:
            return
        try:
            await self._redis.xgroup_create(self._key, self._group, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        self._has_group = True

    async def _groups(self) -> list[dict[str, Any]]:
        if not await self._redis.exists(self._key):
            return []
        groups: Any = await self._redis.xinfo_groups(self._key)
        return list(groups)

    async def _floor(self, group: dict[str, Any]) -> str:
        """The lowest id that the group still needs: its oldest pending entry, else the next one it will read."""
        pending: Any = await self._redis.xpending(self._key, group["name"])
        if pending["pending"]:
            return _text(pending["min"])
        milliseconds, sequence = _order(_text(group["last-delivered-id"]))
        return f"{milliseconds}-{sequence + 1}"

    async def _decoded(self, entries: list[tuple[str, dict[bytes, bytes], int]]) -> list[Delivery]:
        deliveries = []
        for entry_id, fields, times in entries:
            try:
                deliveries.append(Delivery(entry_id, Sample.FromString(fields[_FIELD]), times))
            except (KeyError, DecodeError) as error:
                await self._dead_letter(entry_id, fields, f"not a sample: {type(error).__name__}: {error}")
        return deliveries

    async def _dead_letter(self, entry_id: str, fields: dict[bytes, bytes], reason: str) -> None:
        self._handled += 1
        entry: dict[Any, Any] = {**fields, b"entry_id": entry_id, b"reason": reason[:1024]}
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xadd(self._dead_key, entry, maxlen=MAX_DEAD, approximate=True)
            pipe.xack(self._key, self._group, entry_id)
            await pipe.execute()

    async def _acknowledge_missing(self, entry_ids: set[str]) -> None:
        """Acknowledges entries that were not claimed: those that exist went to another consumer, the rest are lost for
        good."""
        for entry_id in entry_ids:
            if not await self._redis.xrange(self._key, min=entry_id, max=entry_id):
                await self._redis.xack(self._key, self._group, entry_id)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)
