"""The ranks of one job's trainer that somebody else starts, as they announce themselves. Pure: it gets the time.

rule 1   An attempt is one set of ranks, such as one run of torchrun; the place where its ranks meet names it. Another
         set is refused as long as a rank of the first is there.
rule 2   An attempt is over once a rank has left, or was silent for `LOST_S`, or the controller wants it to end. Then
         each of its ranks hears that it must end. The next set begins once they are gone.
rule 3   After a restart the controller knows of no ranks. Those of a former attempt have `LOST_S` to announce
         themselves, and are taken up; no other set begins before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from flowfleet.api.attach import Announcement, End
from flowfleet.errors import Conflict, Unavailable

LOST_S: Final = 20.0
"""A rank announces itself every second, but one at work may keep the interpreter's lock."""


@dataclass
class Attempt:
    number: int
    meets_at: str
    secrets: Mapping[str, str]
    address: str = ""
    """Rank 0's, once it serves."""
    seen: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Rank → its process and when it was here last."""
    end: End = ""


class Desk:
    """`last`: number of the last attempt; 0 where there was none."""

    def __init__(self, job_id: str, world_size: int, last: int, now: float) -> None:
        self._job_id, self._world_size = job_id, world_size
        self.last = last
        self._begins_at = now + (LOST_S if last else 0.0)
        self.attempt: Attempt | None = None
        self.words = ""
        """Why the last attempt ended, by its own account."""

    def announce(self, rank: Announcement, secrets: Mapping[str, str], now: float) -> Attempt:
        """Takes a rank's sign of life. `secrets` prove a new attempt. Raises Unavailable where the rank must ask again,
        Conflict where it must end."""
        if rank.world_size != self._world_size or rank.rank >= self._world_size:
            raise Conflict(
                f"this is rank {rank.rank} of {rank.world_size}, but job {self._job_id} has trainer.world_size = "
                f"{self._world_size}: start as many ranks"
            )
        self.look(now)
        if self.attempt is None:
            self._begin(rank, secrets, now)
        attempt = self.attempt
        assert attempt is not None
        self._check(rank, attempt)
        if rank.left:
            attempt.seen.pop(rank.rank, None)
            attempt.end, self.words = attempt.end or "now", self.words or rank.words
        else:
            attempt.seen[rank.rank] = rank.process, now
            attempt.address = rank.address or attempt.address
        return attempt

    def look(self, now: float) -> None:
        """Ends an attempt that has lost a rank, and forgets one that is gone."""
        if (attempt := self.attempt) is None:
            return
        lost = [rank for rank, (_, at) in attempt.seen.items() if now - at > LOST_S]
        for rank in lost:
            del attempt.seen[rank]
        if lost and not attempt.end:
            attempt.end = "now"
        if attempt.end and not attempt.seen:
            self.attempt = None

    def serves(self) -> str:
        """Address of rank 0 of an attempt whose ranks are all there; "" while there is none."""
        attempt = self.attempt
        is_whole = attempt is not None and not attempt.end and len(attempt.seen) == self._world_size
        return attempt.address if attempt is not None and is_whole else ""

    def waits_for(self) -> str:
        """Says what keeps the trainer from serving."""
        attempt = self.attempt
        if attempt is None:
            return f"waits for {_ranks(self._world_size)} of attempt {self.last + 1}"
        if attempt.end:
            return f"waits until {_ranks(len(attempt.seen))} of attempt {attempt.number} have ended"
        if missing := self._world_size - len(attempt.seen):
            return f"waits for {_ranks(missing)} of attempt {attempt.number}"
        return f"waits until rank 0 of attempt {attempt.number} serves"

    def _begin(self, rank: Announcement, secrets: Mapping[str, str], now: float) -> None:
        if rank.attempt and now < self._begins_at:  # the controller was restarted
            self.attempt = Attempt(rank.attempt, rank.meets_at, secrets)
        elif rank.attempt or rank.left:
            raise Conflict(f"attempt {rank.attempt} of job {self._job_id} is over: this rank must end")
        elif now < self._begins_at:
            raise Unavailable("the controller was restarted: it waits for the ranks of a former attempt")
        else:
            self.attempt, self.words = Attempt(self.last + 1, rank.meets_at, secrets), ""
        self.last = self.attempt.number

    def _check(self, rank: Announcement, attempt: Attempt) -> None:
        process = attempt.seen.get(rank.rank, (rank.process, 0.0))[0]
        is_known = rank.attempt == attempt.number or not rank.attempt
        if is_known and rank.meets_at == attempt.meets_at and rank.process == process:
            if attempt.end and not rank.attempt:
                raise Unavailable(f"attempt {attempt.number} of job {self._job_id} is ending")
            return
        if rank.attempt:
            raise Conflict(f"attempt {rank.attempt} of job {self._job_id} is over: this rank must end")
        if attempt.end:
            raise Unavailable(f"attempt {attempt.number} of job {self._job_id} is ending")
        raise Conflict(
            f"job {self._job_id} has ranks already: attempt {attempt.number}, with {_ranks(len(attempt.seen))}. End "
            "them before you start others"
        )


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
