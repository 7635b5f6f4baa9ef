"""People's votes on groups of samples.

A group is in one of two hashes, by whether it lacks votes, and its votes are a list of their own: `ff:<job>:votes:…`.
They outlive the job's end, as other history does, and leave Redis with the job.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

from flowfleet.api.votes import Asked, Ballot, Vote, VoteGroup
from flowfleet.errors import Conflict, NotFound
from flowfleet.redis import keys
from services.controller.store.link import Linked, Pipe
from services.controller.store.reading import row_of, rows_of
from services.controller.store.records import from_epoch
from services.controller.votes.pairing import is_complete

State = Literal["waiting", "complete"]

MAX_GROUPS = 5000
"""Groups of a job that are kept; beyond it the oldest steps are deleted with their votes."""
MORE_VOTES = 64
"""Votes of a group at most, besides twice those that it wants: repeats, and those of voters at once."""
MAX_REPEATS = 16
"""Votes of one voter on one pair."""
PAGE = 500


class Votes(Linked):
    async def ask(self, job_id: str, step: int, group: int, asked: Asked) -> VoteGroup:
        """Asks for votes on a group. Asked again, it keeps the votes; other samples or another number count from
        now on."""
        place, votes_key = f"{step}/{group}", keys.votes(job_id, step, group)

        async def attempt(pipe: Pipe) -> VoteGroup:
            votes = _votes(await pipe.lrange(votes_key, 0, -1))
            now = from_epoch(await self._link.now())
            done = is_complete([one.index for one in asked.samples], votes, asked.wanted)
            found = VoteGroup(**dict(asked), step=step, group=group, asked_at=now, complete=done)
            pipe.multi()
            _put(pipe, job_id, place, found)
            return found.model_copy(update={"votes": votes})

        found: VoteGroup = await self._link.transaction(attempt, votes_key)
        await self._forget_groups(job_id)
        return found

    async def vote(self, job_id: str, ballot: Ballot) -> Vote:
        """Records a vote; the same id again does nothing. Raises NotFound for a group or sample that no reward asked
        about, Conflict for a group that takes no more, of this voter on this pair or at all."""
        place, votes_key = f"{ballot.step}/{ballot.group}", keys.votes(job_id, ballot.step, ballot.group)

        async def attempt(pipe: Pipe) -> Vote:
            known = await self._record(pipe, job_id, place)
            samples = [one.index for one in known.samples] if known else []
            if known is None or ballot.left == ballot.right or not {ballot.left, ballot.right} <= set(samples):
                raise NotFound(f"no votes are asked for on samples {ballot.left} and {ballot.right} of {place}")
            votes = _votes(await pipe.lrange(votes_key, 0, -1))
            if again := next((vote for vote in votes if vote.id == ballot.id), None):
                return again
            if len(votes) >= 2 * known.wanted + MORE_VOTES:
                raise Conflict(f"group {place} has {len(votes)} votes and takes no more: vote on another")
            vote = Vote(**dict(ballot), time=from_epoch(await self._link.now()))
            if sum((one.voter, one.pair) == (vote.voter, vote.pair) for one in votes) >= MAX_REPEATS:
                raise Conflict(f"{vote.voter} voted {MAX_REPEATS} times on this pair of group {place}: vote on another")
            done = is_complete(samples, [*votes, vote], known.wanted)
            pipe.multi()
            pipe.rpush(votes_key, vote.model_dump_json())
            if done and not known.complete:
                _put(pipe, job_id, place, known.model_copy(update={"complete": True}))
            return vote

        vote: Vote = await self._link.transaction(attempt, votes_key)
        return vote

    async def waiting(self, job_id: str) -> list[VoteGroup]:
        """Groups that lack votes, oldest first, with their votes."""
        rows = await self._redis.hvals(keys.vote_groups(job_id, "waiting"))
        return await self._with_votes(job_id, rows)

    async def some_complete(self, job_id: str, count: int) -> list[VoteGroup]:
        """Groups at random that lack none."""
        found = await self._redis.hrandfield(keys.vote_groups(job_id, "complete"), count, withvalues=True)
        return await self._with_votes(job_id, found[1::2])

    async def groups(self, job_id: str, after: tuple[int, int] | None, limit: int) -> list[VoteGroup]:
        """Groups with their votes, by step and group, after one of them."""
        places = sorted(place for place in await self.places(job_id) if after is None or place > after)[:limit]
        return await self._at(job_id, places)

    async def newest(self, job_id: str, limit: int) -> list[VoteGroup]:
        """The groups of the newest steps, with their votes, oldest first."""
        return await self._at(job_id, sorted(await self.places(job_id))[-limit:])

    async def _at(self, job_id: str, places: Sequence[tuple[int, int]]) -> list[VoteGroup]:
        if not places:
            return []
        fields = [f"{step}/{group}" for step, group in places]
        async with self._redis.pipeline(transaction=True) as pipe:
            for state in _STATES:
                pipe.hmget(keys.vote_groups(job_id, state), fields)
            rows = await pipe.execute()
        return await self._with_votes(job_id, [one or other for one, other in zip(*rows, strict=True) if one or other])

    async def places(self, job_id: str) -> set[tuple[int, int]]:
        """Steps and groups that people were asked about."""
        async with self._redis.pipeline(transaction=True) as pipe:
            for state in _STATES:
                pipe.hkeys(keys.vote_groups(job_id, state))
            return {_place(field) for fields in await pipe.execute() for field in fields}

    async def _record(self, pipe: Pipe, job_id: str, place: str) -> VoteGroup | None:
        rows = [await pipe.hget(keys.vote_groups(job_id, state), place) for state in _STATES]
        row = rows[0] or rows[1]
        return None if row is None else row_of(VoteGroup, row)

    async def _with_votes(self, job_id: str, rows: Iterable[bytes]) -> list[VoteGroup]:
        groups = sorted(rows_of(VoteGroup, rows), key=lambda one: (one.step, one.group))
        votes = await self._link.each(
            groups, lambda pipe, one: pipe.lrange(keys.votes(job_id, one.step, one.group), 0, -1)
        )
        return [one.model_copy(update={"votes": _votes(rows)}) for one, rows in zip(groups, votes, strict=True)]

    async def _forget_groups(self, job_id: str) -> None:
        """Deletes the oldest groups beyond the limit."""
        names = [keys.vote_groups(job_id, state) for state in _STATES]
        if sum([await self._redis.hlen(name) for name in names]) <= MAX_GROUPS:
            return
        oldest = sorted(await self.places(job_id))[:-MAX_GROUPS]
        async with self._redis.pipeline(transaction=True) as pipe:
            for name in names:
                pipe.hdel(name, *(f"{step}/{group}" for step, group in oldest))
            pipe.unlink(*(keys.votes(job_id, *place) for place in oldest))
            await pipe.execute()


_STATES: tuple[State, ...] = ("waiting", "complete")


def _put(pipe: Pipe, job_id: str, place: str, group: VoteGroup) -> None:
    """Adds to a transaction that the group is in the hash of its state alone."""
    state = _STATES[group.complete]
    pipe.hdel(keys.vote_groups(job_id, _STATES[not group.complete]), place)
    pipe.hset(keys.vote_groups(job_id, state), place, group.model_dump_json(exclude={"votes"}))


def _place(field: bytes) -> tuple[int, int]:
    step, _, group = field.decode().partition("/")
    return int(step), int(group)


def _votes(rows: Iterable[bytes]) -> list[Vote]:
    return rows_of(Vote, rows)
