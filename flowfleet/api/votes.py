"""People's votes on pairs of a job's samples, and reports on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from flowfleet.api.answers import Answer, FiniteOrNone
from flowfleet.api.samples import EXTENSIONS
from flowfleet.filesystem import writing
from flowfleet.part import rule

Choice = Literal["left", "right", "tie", "neither"]
"""The better sample; `tie`: both are as good, `neither`: both are bad."""
VOTER = rule(r"^[A-Za-z0-9._@-]{1,64}$|^$", "give up to 64 letters, digits and ._@-")
Number = Annotated[int, Field(ge=0, le=10_000_000)]
MAX_GROUP = 1024
MAX_WANTED = 4096
"""Votes on a group at most: the controller reads all of them for each further one."""


class Ballot(Answer):
    """A voter's answer for one pair of a group, as it is posted."""

    step: Number
    group: Number
    left: Number
    """Index of the sample that was shown on the left, or above."""
    right: Number
    choice: Choice
    id: str = Field(pattern=rule(r"^[A-Za-z0-9-]{8,64}$", "give 8 to 64 letters, digits and '-'"))
    """Random: a vote that is sent again counts once."""
    voter: str = Field(default="", pattern=VOTER)
    """Name of the voter, where the API key is not a person's own; empty: the key's name."""


class Vote(Ballot):
    """A vote that the controller keeps."""

    time: datetime

    @property
    def pair(self) -> tuple[int, int]:
        """Its samples, the smaller index first."""
        return min(self.left, self.right), max(self.left, self.right)

    @property
    def better(self) -> int | None:
        """Index of the better sample; None for a tie, and where neither is good."""
        return {"left": self.left, "right": self.right}.get(self.choice)


def counted(votes: Sequence[Vote]) -> list[Vote]:
    """The votes without those by which a voter repeats a pair, which measure the voter alone."""
    seen, found = set[tuple[str, tuple[int, int]]](), list[Vote]()
    for vote in votes:
        if (vote.voter, vote.pair) not in seen:
            seen.add((vote.voter, vote.pair))
            found.append(vote)
    return found


class VoteSample(Answer):
    index: Number
    media_type: str = Field(default="image/png", max_length=64)


class Asked(Answer):
    """A group that people are asked to vote on."""

    prompt: str = Field(max_length=65_536)
    samples: list[VoteSample] = Field(min_length=2, max_length=MAX_GROUP)
    wanted: int = Field(ge=1, le=MAX_WANTED)
    """Votes, not counting those by which a voter repeats a pair."""


class VoteGroup(Asked):
    step: Number
    group: Number
    asked_at: datetime
    """When the votes were last asked for."""
    votes: list[Vote] = Field(default=[])
    """In the order that they came."""
    complete: bool = False
    """There are as many votes as wanted, and they connect all samples."""


class VoteSide(Answer):
    index: Number
    media: str
    """Where the picture or video is served."""
    media_type: str


class VotePair(Answer):
    step: Number
    group: Number
    prompt: str
    left: VoteSide
    right: VoteSide


class VoteQueue(Answer):
    pairs: list[VotePair]
    """To vote on, in order; none while no group waits for this voter."""
    waiting: int
    """Votes that are still wanted, of anybody."""
    given: int
    """Votes of this voter on the groups that wait."""


class Voter(Answer):
    name: str
    votes: int
    repeats: int = 0
    """Pairs that were shown again."""
    consistency: FiniteOrNone = None
    """Share of the repeats with the same choice; null without any."""
    shared: int = 0
    """Votes on pairs that another voter has voted on."""
    agreement: FiniteOrNone = None
    """Share of those with the same choice."""


class RewardAgreement(Answer):
    pairs: int
    """Votes for one side whose samples both have a score."""
    agreement: FiniteOrNone
    """Share of these in which the reward prefers the same side; equal scores count half."""


class VoteReport(Answer):
    """Report on a job's votes, over the newest 1,024 groups."""

    votes: int = 0
    groups: int = 0
    waiting: int = 0
    """Votes that are still wanted."""
    voters: list[Voter] = Field(default=[])
    agreement: FiniteOrNone = None
    """Share of pairs of voters with the same choice, over pairs that several voted on; null without any."""
    rewards: dict[str, RewardAgreement] = Field(default={})
    """Agreement by reward, other than the votes themselves."""
    warnings: list[str] = Field(default=[])


@dataclass(frozen=True)
class Exported:
    """A preference file that was written."""

    file: Path
    pairs: int
    left_out: int
    """Pairs whose pictures are no longer kept."""


class Preference(Answer):
    """A pair of which most votes prefer one sample."""

    step: Number
    group: Number
    prompt: str
    chosen: VoteSide
    rejected: VoteSide
    votes: int
    """Votes that prefer the chosen one, less those that prefer the other."""

    @property
    def sides(self) -> dict[str, VoteSide]:
        """Sides by their column of a preference file."""
        return {"chosen": self.chosen, "rejected": self.rejected}

    def file_of(self, side: VoteSide) -> str:
        """Name of a side's file, in the folder of the preference file."""
        return f"{self.step:06d}-{self.group:05d}-{side.index:05d}.{EXTENSIONS.get(side.media_type, 'png')}"


def keep(path: Path, data: bytes) -> None:
    """Writes a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        path.write_bytes(data)
