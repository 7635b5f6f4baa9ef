"""The job's samples as people look at them: prompt, scores and where the picture is.

For each purpose one hash (reference → record) and two sorted sets: by reference, which is by step, and by reward.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from flowfleet.api.samples import Purpose
from flowfleet.errors import NotFound
from flowfleet.proto.common_pb2 import BlobRef
from flowfleet.redis import keys
from services.controller.store.link import Linked, Pipe
from services.controller.store.reading import row_of, rows_of
from services.controller.store.records import Order, SampleRecord

MAX_SAMPLES = 100_000
"""Maximum number of samples of one purpose; beyond it the oldest steps are deleted."""
PAGE = 1000

_SWAP = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""

FOREIGN_CURSOR = "cursor: take it from `next_cursor` of the page before, with the same order and step"


_GROUP = len("0000000000/00000")
"""Length of a reference without the index."""


class _Names:
    def __init__(self, job_id: str, purpose: Purpose) -> None:
        self.records = keys.samples(job_id, purpose, "records")
        self.order = keys.samples(job_id, purpose, "order")
        self.rewards = keys.samples(job_id, purpose, "rewards")


class Samples(Linked):
    async def put(self, job_id: str, *samples: SampleRecord) -> None:
        """Adds or replaces records, one for each (purpose, step, group, index)."""
        purposes: set[Purpose] = set()
        async with self._redis.pipeline(transaction=True) as pipe:
            for sample in samples:
                _put(pipe, _Names(job_id, sample.purpose), sample)
                purposes.add(sample.purpose)
            await pipe.execute()
        for purpose in purposes:
            await self._forget_oldest(job_id, purpose)

    async def put_shadow(
        self, job_id: str, purpose: Purpose, shadow: str, scores: Mapping[tuple[int, int, int], float]
    ) -> None:
        """Adds what a shadow gave the samples (step, group, index) to their records. Of two who change one record at
        once the second reads it again; a record that is no longer kept stays away."""
        name = _Names(job_id, purpose).records
        left = {_reference(*place): score for place, score in scores.items()}
        while left:
            rows = await self._redis.hmget(name, list(left))
            known = [(ref, row) for ref, row in zip(left, rows, strict=True) if row is not None]
            async with self._redis.pipeline(transaction=False) as pipe:
                for ref, row in known:
                    record = row_of(SampleRecord, row)
                    changed = record.model_copy(update={"shadow": {**record.shadow, shadow: left[ref]}})
                    pipe.eval(_SWAP, 1, name, ref, row, changed.model_dump_json())
                done = await pipe.execute()
            left = {ref: left[ref] for (ref, _), swapped in zip(known, done, strict=True) if not swapped}

    async def get(self, job_id: str, step: int, group: int, index: int, purpose: Purpose = "train") -> SampleRecord:
        """Raises NotFound."""
        row = await self._redis.hget(_Names(job_id, purpose).records, _reference(step, group, index))
        if row is None:
            raise NotFound(f"job {job_id} has no {purpose} sample {step}/{group}/{index}")
        return row_of(SampleRecord, row)

    async def find(self, job_id: str, places: Sequence[tuple[int, int, int]]) -> list[SampleRecord]:
        """Training samples (step, group, index) that are kept, in order."""
        return await self._records(job_id, "train", [_reference(*place).encode() for place in places])

    async def page(
        self,
        job_id: str,
        *,
        purpose: Purpose = "train",
        step: int | None = None,
        groups: tuple[int, int] | None = None,
        order: Order = "newest",
        by: str = "",
        one_a_group: bool = False,
        cursor: str | None = None,
        limit: int = 50,
    ) -> tuple[list[SampleRecord], str | None]:
        """A page and the cursor of the next one (None: there is none).

        `best` and `worst` go by reward and leave out samples without one; their pages may shift while the job runs.
        `groups`: of a step those from the first to before the second; `by`: best and worst of a step by this reward's
        own score; `one_a_group`: of newest and oldest one sample of each group. Raises ValueError for a cursor that is
        none of ours, and for filters that do not go together.
        """
        _check_filters(step, groups, order, by, one_a_group)
        if by and step is not None:
            return await self._by_score(job_id, purpose, step, by, order == "best", cursor, limit)
        if order in ("best", "worst"):
            return await self._by_reward(job_id, purpose, step, order == "best", cursor, limit)
        _check_reference(cursor, step)
        bounds = _bounds(step, groups)
        found = await self._references(job_id, purpose, bounds, order == "newest", cursor, limit + 1, one_a_group)
        following = found[limit - 1].decode() if len(found) > limit else None
        return await self._records(job_id, purpose, found[:limit]), following

    async def _references(
        self,
        job_id: str,
        purpose: Purpose,
        bounds: tuple[str, str],
        is_newest: bool,
        cursor: str | None,
        limit: int,
        one_a_group: bool,
    ) -> list[bytes]:
        """References after a cursor, in order; of each group the first that comes, where one is wanted."""
        name, (low, high) = _Names(job_id, purpose).order, bounds
        seen = cursor[:_GROUP].encode() if cursor and one_a_group else b""
        found: list[bytes] = []
        while True:
            count = PAGE if one_a_group else limit
            if is_newest:
                page = await self._redis.zrevrangebylex(name, f"({cursor}" if cursor else high, low, 0, count)
            else:
                page = await self._redis.zrangebylex(name, f"({cursor}" if cursor else low, high, 0, count)
            for reference in page:
                if not one_a_group or reference[:_GROUP] != seen:
                    found.append(reference)
                seen = reference[:_GROUP]
            if len(found) >= limit or len(page) < count:
                return found[:limit]
            cursor = page[-1].decode()

    async def _by_score(
        self, job_id: str, purpose: Purpose, step: int, by: str, best: bool, cursor: str | None, limit: int
    ) -> tuple[list[SampleRecord], str | None]:
        """Samples of a step by one reward's own score; those without one are left out."""
        start = _offset(cursor)
        references = await self._redis.zrangebylex(_Names(job_id, purpose).order, *_bounds(step, None))
        scored = []
        for place in range(0, len(references), PAGE):
            records = await self._records(job_id, purpose, references[place : place + PAGE])
            scored += [(score, record) for record in records if (score := record.scores.get(by)) is not None]
        scored.sort(key=lambda pair: pair[0], reverse=best)
        following = str(start + limit) if len(scored) > start + limit else None
        return [record for _, record in scored[start : start + limit]], following

    async def _by_reward(
        self, job_id: str, purpose: Purpose, step: int | None, best: bool, cursor: str | None, limit: int
    ) -> tuple[list[SampleRecord], str | None]:
        start = _offset(cursor)
        name = _Names(job_id, purpose).rewards
        if step is None:
            found = await self._redis.zrange(name, start, start + limit, desc=best)
        else:
            found = (await self._step_by_reward(job_id, purpose, step, best))[start : start + limit + 1]
        following = str(start + limit) if len(found) > limit else None
        return await self._records(job_id, purpose, found[:limit]), following

    async def _step_by_reward(self, job_id: str, purpose: Purpose, step: int, best: bool) -> list[bytes]:
        names = _Names(job_id, purpose)
        references = await self._redis.zrangebylex(names.order, f"[{step:010d}/", f"[{step:010d}0")
        scores = await self._redis.zmscore(names.rewards, references) if references else []
        scored = [(score, reference) for score, reference in zip(scores, references, strict=True) if score is not None]
        return [reference for _, reference in sorted(scored, reverse=best)]

    async def _records(self, job_id: str, purpose: Purpose, references: Iterable[bytes]) -> list[SampleRecord]:
        wanted = list(references)
        rows = await self._redis.hmget(_Names(job_id, purpose).records, wanted) if wanted else []
        return rows_of(SampleRecord, (row for row in rows if row is not None))

    async def _forget_oldest(self, job_id: str, purpose: Purpose) -> None:
        names = _Names(job_id, purpose)
        count = await self._redis.zcard(names.order) - MAX_SAMPLES
        if count <= 0:
            return
        oldest = await self._redis.zrange(names.order, 0, count - 1)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(names.records, *oldest)
            pipe.zrem(names.order, *oldest)
            pipe.zrem(names.rewards, *oldest)
            await pipe.execute()


def media_ref(sample: SampleRecord) -> BlobRef:
    """The place of the sample's picture or video."""
    return BlobRef(uri=sample.media_uri, size_bytes=sample.media_size_bytes, sha256=sample.media_sha256)


def _put(pipe: Pipe, names: _Names, sample: SampleRecord) -> None:
    reference = _reference(sample.step, sample.group, sample.index)
    pipe.hset(names.records, reference, sample.model_dump_json())
    pipe.zadd(names.order, {reference: 0})
    if sample.reward is None:
        pipe.zrem(names.rewards, reference)
    else:
        pipe.zadd(names.rewards, {reference: sample.reward})


def _reference(step: int, group: int, index: int) -> str:
    """Reference of fixed width, so that lexical order is numeric order."""
    return f"{step:010d}/{group:05d}/{index:05d}"


def _check_reference(cursor: str | None, step: int | None) -> None:
    known = cursor is None or re.fullmatch(r"\d{10}/\d{5}/\d{5}", cursor, re.ASCII)
    if not known or (cursor and step is not None and int(cursor[:10]) != step):
        raise ValueError(FOREIGN_CURSOR)


def _bounds(step: int | None, groups: tuple[int, int] | None) -> tuple[str, str]:
    if step is None:
        return "-", "+"
    if groups is None:
        return f"[{step:010d}/", f"[{step:010d}0"
    return f"[{step:010d}/{groups[0]:05d}/", f"({step:010d}/{groups[1]:05d}/"


def _check_filters(step: int | None, groups: tuple[int, int] | None, order: Order, by: str, one_a_group: bool) -> None:
    by_reward = order in ("best", "worst")
    if groups is not None and (step is None or by_reward):
        raise ValueError("group_from and group_to: give a step as well, and order newest or oldest")
    if by and (step is None or not by_reward):
        raise ValueError("by: give a step as well, and order best or worst")
    if one_a_group and by_reward:
        raise ValueError("each: give order newest or oldest")


def _offset(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not re.fullmatch(r"\d{1,12}", cursor, re.ASCII):
        raise ValueError(FOREIGN_CURSOR)
    return int(cursor)
