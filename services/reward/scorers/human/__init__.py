"""`human`: people's votes on pairs of a group, as scores.

    Score of a group ─► asks the controller's REST for votes on it ─► pending, until there are enough
                                                                 └──► Bradley-Terry scores (bradley_terry)

The controller keeps the votes (docs/votes.md), so this service has no state: any replica may be asked again, and a
restart loses nothing. It calls REST as the Python client does: FLOWFLEET_URL, FLOWFLEET_API_KEY (a key that may `ask`)
and FLOWFLEET_CA.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from flowfleet.api.problems import ApiError
from flowfleet.api.votes import MAX_WANTED, Asked, Vote, VoteSample, counted
from flowfleet.client.asynchronous import AsyncClient
from flowfleet.errors import Unavailable
from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_TEXT, MODALITY_VIDEO
from flowfleet.rewards.requests import EncodedSample
from services.reward import bradley_terry
from services.reward.execution.groups import by_group
from services.reward.scorer import AsyncScorer, Outcome, Pending, Problem, Score, ScorerSettings, number, read_params

MAX_VOTES_PER_SAMPLE = 1000.0


class HumanSettings(ScorerSettings):
    url: str | None = None
    """URL of the controller; unset: FLOWFLEET_URL, else this machine's stack."""
    prior_std: float = Field(default=1.0, gt=0.0, le=100.0)
    """Standard deviation of the scores before any vote."""


@dataclass(frozen=True)
class HumanParams:
    votes_per_sample: float = 2.0
    """Mean votes per sample of a group."""

    def wanted(self, num_samples: int) -> int:
        """Votes on a group: enough to connect all samples, at most MAX_WANTED and one on each pair, which one voter can
        give."""
        pairs = num_samples * (num_samples - 1) // 2
        return max(num_samples - 1, min(pairs, MAX_WANTED, math.ceil(self.votes_per_sample * num_samples / 2)))


class HumanScorer(AsyncScorer[HumanParams]):
    name = "human"
    version = "1"
    modalities = (MODALITY_IMAGE, MODALITY_VIDEO, MODALITY_TEXT)
    score_range = (-math.inf, math.inf)
    components = ("win_rate", "votes")
    needs_group = True
    may_wait = True

    def __init__(self, settings: HumanSettings) -> None:
        self._settings = settings
        self._client: AsyncClient

    async def start(self) -> None:
        self._client = AsyncClient(self._settings.url)

    async def close(self) -> None:
        await self._client.aclose()

    def parse(self, params: Mapping[str, str]) -> HumanParams:
        hint = f"say more than 0 and at most {MAX_VOTES_PER_SAMPLE:g}"
        votes = number(float, lambda it: 0.0 < it <= MAX_VOTES_PER_SAMPLE, hint)
        return HumanParams(**read_params(params, {"votes_per_sample": votes}))

    async def score(self, samples: Sequence[EncodedSample], params: HumanParams) -> list[Outcome]:
        """Scores of the groups with enough votes; the others are pending."""
        return await by_group(samples, lambda group: self._score_group(group, params))

    async def _score_group(self, samples: Sequence[EncodedSample], params: HumanParams) -> list[Outcome]:
        places = [_place(sample.sample_id) for sample in samples]
        jobs = {place[:3] for place in places if place is not None}
        if None in places or len(jobs) != 1 or len(set(places)) < 2:
            return [Pending("only groups of a job's samples can be voted on")] * len(samples)
        ((job, step, group),) = jobs
        indices = [place[3] for place in places if place is not None]
        shown = [VoteSample(index=i, media_type=one.media_type) for i, one in zip(indices, samples, strict=True)]
        asked = Asked(prompt=samples[0].prompt, samples=shown, wanted=params.wanted(len(samples)))
        try:
            known = await self._client.ask_votes(job, step, group, asked)
        except ApiError as error:
            return [self._refusal(error)] * len(samples)
        if not known.complete:
            given = len(counted(known.votes))
            votes = f"people gave {given} of {max(known.wanted, given + 1)} votes on group {known.step}/{known.group}"
            return [Pending(votes)] * len(samples)
        return _scored(counted(known.votes), indices, self._settings.prior_std)

    def _refusal(self, error: ApiError) -> Outcome:
        """Returns the group's outcome for a refused request. Raises Unavailable where the service cannot ask at all."""
        if error.status == httpx.codes.NOT_FOUND:
            return Pending(f"the controller at {self._client.url} does not have these samples: {error.detail}")
        if error.status in (httpx.codes.CONFLICT, httpx.codes.BAD_REQUEST):
            return Problem("refused", f"the controller at {self._client.url} refuses: {error.detail}")
        hint = ": give it a key that may ask, as FLOWFLEET_API_KEY" if error.status in (401, 403) else ""
        raise Unavailable(f"cannot ask for votes: {error.detail}{hint}")


def _scored(votes: Sequence[Vote], indices: Sequence[int], prior_std: float) -> list[Outcome]:
    """Computes one score per sample, in order. Votes on samples that have left the group do not count."""
    wins = win_table(votes, indices)
    theta = bradley_terry.scores(wins, prior_std)
    chance, number = bradley_terry.preferred(theta), (wins + wins.T).sum(axis=1)
    rate = (chance.sum(axis=1) - 0.5) / (len(indices) - 1)
    return [
        Score(float(theta[k]), {"win_rate": float(rate[k]), "votes": float(number[k])}) for k in range(len(indices))
    ]


def win_table(votes: Sequence[Vote], indices: Sequence[int]) -> NDArray[np.float64]:
    """(N, N) how often the sample at place i was preferred to that at j. A tie is half a preference each way, and so
    is `neither`: in a group it says that both are as bad."""
    place = {index: k for k, index in enumerate(indices)}
    wins = np.zeros((len(indices), len(indices)))
    for vote in votes:
        if vote.left in place and vote.right in place:
            left, right = place[vote.left], place[vote.right]
            share = {"left": 1.0, "right": 0.0}.get(vote.choice, 0.5)
            wins[left, right] += share
            wins[right, left] += 1.0 - share
    return wins


def _place(sample_id: str) -> tuple[str, int, int, int] | None:
    """Job, step, group and index of a sample's name (flowfleet/data/samples.py)."""
    job, *numbers = sample_id.split("/")
    if len(numbers) != 3 or not all(number.isdecimal() and len(number) < 8 for number in numbers) or not job.isascii():
        return None
    step, group, index = map(int, numbers)
    return job, step, group, index


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> HumanScorer:
    return HumanScorer(HumanSettings.read(settings))
