"""Registry of the rollout replicas in Redis: replicas write their records, the controller reads the changes.

    records    hash: replica → `ReplicaRecord` as JSON
    renewed    sorted set: replica → when it was renewed last, in ms of the server's clock
    changed    sorted set: replica → revision at which its record changed last
    revision   counts the changes of all records
    owner:ID   the process that joined last under a replica's id; kept for a day after it was renewed last

A replica writes its record every few seconds and whenever it changes; one that is not renewed for `EXPIRES_S` is gone.
A process that was suspended may wake when another has taken its place: it writes no further record, and exits. The cost
of a look depends on the number of changes since the last one, not on the number of replicas. Each call is one script,
so that a reader never sees half of a change.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from flowfleet.process.service import check_address
from flowfleet.redis import keys

log = logging.getLogger(__name__)

EXPIRES_S: Final = 15.0
RENEW_EVERY_S: Final = 3.0
STALE_S: Final = 4.5
"""A record that is older was not renewed when it should have been."""
OWNER_S: Final = 24 * 3600
"""A process that wakes later than this after its successor has ended may join again."""
MAX_DRIFT_MS: Final = 5000
"""Milliseconds that the server's clock may gain or lose on ours between two looks; beyond it has jumped."""
SETTLES_S: Final = 2 * RENEW_EVERY_S
"""After a jump, or a reader's start, every replica is renewed within this."""
VANISHED: Final = "the blob store has no adapter"
"""Part of a replica's answer where the blob of an adapter is gone, or is another than was published."""
MAX_RECORD_BYTES: Final = 16 * 1024
MAX_NUMBER: Final = 2**63
LOOK_COUNT: Final = 1000
"""Maximum number of changes that one look returns, because a script blocks all other commands."""

_PUT = """
local owner = redis.call('GET', KEYS[5])
if owner and owner ~= ARGV[3] and ARGV[4] == '' then return 0 end
redis.call('SET', KEYS[5], ARGV[3], 'EX', ARGV[5])
local now = redis.call('TIME')
redis.call('ZADD', KEYS[2], now[1] * 1000 + math.floor(now[2] / 1000), ARGV[1])
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
  redis.call('ZADD', KEYS[3], redis.call('INCR', KEYS[4]), ARGV[1])
end
return 1
"""
_REMOVE = """
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held and cjson.decode(held).incarnation == ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('ZREM', KEYS[3], ARGV[1])
end
"""
_LOOK = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local drift = tonumber(ARGV[5])
local is_steady = math.abs(now - tonumber(ARGV[6])) <= drift
local function range(low, high) return redis.call('ZRANGEBYSCORE', KEYS[2], low, high) end
local function older(ms) return is_steady and range('-inf', string.format('(%.0f', now - ms)) or {} end
local function forget(ids)
  for _, id in ipairs(ids) do
    redis.call('HDEL', KEYS[1], id)
    redis.call('ZREM', KEYS[2], id)
    redis.call('ZREM', KEYS[3], id)
  end
end
if is_steady and ARGV[7] == '1' then
  forget(older(ARGV[3]))
  forget(range(string.format('(%.0f', now + drift), '+inf'))
end
local revision, since = tonumber(redis.call('GET', KEYS[4]) or '0'), tonumber(ARGV[1])
if since > revision then since = 0 end
local found = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. since, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
local records = {}
for place = 1, #found, 2 do
  local record = redis.call('HGET', KEYS[1], found[place])
  if record then
    records[#records + 1] = found[place]
    records[#records + 1] = record
  end
  since = tonumber(found[place + 1])
end
return {since, redis.call('ZCARD', KEYS[2]), records, older(ARGV[4]), now}
"""


def rank_id(job_id: str, rank: int) -> str:
    """Replica id of a trainer's rank that samples for its own job."""
    return f"{job_id}.rank{rank}"


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """Record of a replica, written by the replica itself."""

    replica_id: str
    address: str
    """host:port at which the fleet reaches its RolloutService."""
    incarnation: str
    """New at every process start."""
    model: str
    """Preloaded model, empty for none."""
    pool: str
    """Rollout pool; a job samples on the replicas of one pool."""
    state: str = "idle"
    """idle, serving, updating or draining: RolloutState of rollout.proto."""
    job_id: str = ""
    version: int = 0
    """Version of the policy; meaningful while serving."""
    evaluated: bool = False
    """True if the replica serves the version's evaluated weights, False if it serves those that sample."""
    digest: str = ""
    samples_total: int = 0
    """Since its start."""
    device: str = ""
    device_id: str = ""
    """Id of the accelerator, the same in every process; empty on the CPU."""
    num_devices: int = 1
    """Devices that share each sample, from `device` on."""
    held: str = ""
    """Weights that are ready, with spaces between: "JOB/VERSION", or "JOB/VERSION/evaluated"."""
    slots: int = 0
    """Adapters that it can have ready at once; 0: it serves one job at a time."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> ReplicaRecord:
        """Ignores unknown fields, which a newer replica may have. Raises ValueError for what is not a record, and for
        texts and numbers that metrics, logs and messages cannot carry."""
        if len(text) > MAX_RECORD_BYTES:
            raise ValueError(f"{len(text)} bytes are more than {MAX_RECORD_BYTES}")
        try:
            said = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(said, dict):
            raise ValueError("it is no object")
        known = {field.name: said[field.name] for field in fields(cls) if field.name in said}
        wrong = [
            field.name for field in fields(cls) if type(known.get(field.name, field.default)).__name__ != field.type
        ]
        if wrong:
            raise ValueError(f"missing, or of another type: {', '.join(wrong)}")
        if not all(value.isprintable() for value in known.values() if isinstance(value, str)):
            raise ValueError("a text of it cannot be printed")
        if not all(0 <= value < MAX_NUMBER for value in known.values() if isinstance(value, int)):
            raise ValueError("a number of it is out of range")
        check_address(known["address"])
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Look:
    """Result of a look at the registry."""

    revision: int
    """Revision up to which changes are in; give it to the next look."""
    number: int
    """Number of replicas."""
    changed: tuple[ReplicaRecord, ...]
    """Records that changed, oldest first; if there are `LOOK_COUNT` of them there may be more."""
    stale: frozenset[str]
    """Replicas whose record was not renewed in time."""
    unreadable: frozenset[str] = frozenset()
    """Replicas whose changed record we cannot read; they count in `number`."""


class _Steadiness:
    """Watch over the server's clock, which must keep pace with this process's monotonic clock. After a jump no replica
    is stale or gone until all have had time to renew their record by the new clock."""

    def __init__(self) -> None:
        self._base_ms: float | None = None
        """Server's clock minus this process's."""
        self._judges_from = float("inf")
        self._forgets_from = float("inf")

    def expected(self) -> tuple[int, int]:
        """Returns the server's time that is expected now, in ms, or -1 while replicas may not be judged by it; and 1 if
        replicas that are gone may be forgotten, else 0."""
        now = time.monotonic()
        if self._base_ms is None or now < self._judges_from:
            return -1, 0
        return int(self._base_ms + 1000 * now), int(now >= self._forgets_from)

    def seen(self, server_ms: int) -> None:
        """Compares the server's clock, just read, with the last reading."""
        now = time.monotonic()
        base_ms, self._base_ms = self._base_ms, server_ms - 1000 * now
        if base_ms is None:
            self._judges_from, self._forgets_from = now, now + SETTLES_S
        elif abs(self._base_ms - base_ms) > MAX_DRIFT_MS:
            log.warning("Redis clock jumped by %.0f s", (self._base_ms - base_ms) / 1000)
            self._judges_from = self._forgets_from = now + SETTLES_S


class ReplicaDirectory:
    """`client` decodes no replies."""

    def __init__(self, client: Any) -> None:
        self._redis = client
        names = ("records", "renewed", "changed", "revision")
        self._keys = [keys.replicas(name) for name in names]
        self._steadiness = _Steadiness()
        self._put, self._remove, self._look = (client.register_script(text) for text in (_PUT, _REMOVE, _LOOK))

    async def put(self, record: ReplicaRecord, pipe: Any = None, *, joins: bool = False) -> bool:
        """Writes or renews, now or as part of a pipeline. A process that `joins` takes the place of any other of its
        id. False for one whose place was taken: nothing is written."""
        names = [*self._keys, keys.replicas("owner", record.replica_id)]
        given = [record.replica_id, record.to_json(), record.incarnation, "joins" if joins else "", OWNER_S]
        return bool(await self._put(keys=names, args=given, client=pipe))

    async def remove(self, record: ReplicaRecord) -> None:
        """A successor under the same id may be there already: it stays."""
        await self._remove(keys=self._keys, args=[record.replica_id, record.incarnation])

    async def get(self, replica_id: str) -> ReplicaRecord | None:
        """Returns a replica's record, even if it is no longer renewed, until a look removes it."""
        record = await self._redis.hget(self._keys[0], replica_id)
        return None if record is None else ReplicaRecord.from_json(record)

    async def look(self, revision: int = 0) -> Look:
        """Returns the records that changed after a revision. Forgets replicas that are gone."""
        ages = [int(1000 * EXPIRES_S), int(1000 * STALE_S)]
        given = [revision, LOOK_COUNT, *ages, MAX_DRIFT_MS, *self._steadiness.expected()]
        answer = await self._look(keys=self._keys, args=given)
        reached, number, records, stale, now_ms = answer
        self._steadiness.seen(now_ms)
        changed, unreadable = [], []
        for name, record in zip(records[::2], records[1::2], strict=True):
            try:
                changed.append(_record_of(_name(name), record))
            except ValueError as error:
                log.error("replica %r ignored: could not read its record: %s", _name(name), error)
                unreadable.append(_name(name))
        stale_names = frozenset(map(_name, stale))
        return Look(reached, number, tuple(changed), stale_names, frozenset(unreadable))

    async def members(self) -> Collection[str]:
        """Ids of all replicas."""
        return set(map(_name, await self._redis.zrange(self._keys[1], 0, -1)))


def _name(replica_id: bytes) -> str:
    """Decodes an id from any bytes, because a replica chooses the name of its record."""
    return replica_id.decode(errors="backslashreplace")


def _record_of(name: str, text: bytes) -> ReplicaRecord:
    """Parses the record under a name. Raises ValueError for anything else, and for another replica's record."""
    record = ReplicaRecord.from_json(text)
    if record.replica_id != name:
        raise ValueError(f"it speaks for {record.replica_id!r}")
    return record
