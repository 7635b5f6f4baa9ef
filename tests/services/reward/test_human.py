"""The reward `human`: Bradley-Terry scores against other ways to get them, and what it asks of a controller."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import numpy as np
import pytest

from flowfleet.api.votes import Choice, Vote
from flowfleet.client.asynchronous import AsyncClient
from flowfleet.errors import Unavailable
from flowfleet.rewards.requests import EncodedSample
from services.reward.bradley_terry import preferred, scores
from services.reward.scorer import Pending, Problem, Score
from services.reward.scorers import make
from services.reward.scorers.human import HumanParams, HumanScorer, win_table

JOB = "0190a1b2-0000-7000-8000-000000000000"
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def two_samples(won: float, lost: float, prior_std: float) -> float:
    """θ of the first of two: by symmetry θ_2 = −θ_1 = −d/2, and the slope (won + lost)·σ(−d) − lost − d/(2s²) is 0,
    found by halving."""
    low, high = -200.0, 200.0
    for _ in range(200):
        d = (low + high) / 2
        slope = won - (won + lost) / (1 + math.exp(-d)) - d / (2 * prior_std**2)
        low, high = (d, high) if slope > 0 else (low, d)
    return low / 2


@pytest.mark.parametrize(("won", "lost"), [(1, 0), (0, 1), (3, 1), (0.5, 0.5), (40, 2), (1000, 0)])
@pytest.mark.parametrize("prior_std", [0.1, 1.0, 10.0])
def test_two_samples_have_the_scores_of_the_closed_equation(won: float, lost: float, prior_std: float) -> None:
    found = scores(np.array([[0.0, won], [lost, 0.0]]), prior_std)
    expected = two_samples(won, lost, prior_std)
    assert found == pytest.approx([expected, -expected], abs=1e-9)


def hunter(wins: np.ndarray, rounds: int = 20_000) -> np.ndarray:
    """Maximum likelihood without a prior by Hunter's MM algorithm (Annals of Statistics 32, 2004, equation 3)."""
    strength, total = np.ones(len(wins)), wins + wins.T
    for _ in range(rounds):
        strength = wins.sum(axis=1) / (total / (strength[:, None] + strength[None])).sum(axis=1)
        strength /= np.exp(np.log(strength).mean())
    return np.log(strength)


def test_with_a_wide_prior_they_are_the_most_likely_ones() -> None:
    wins = np.random.default_rng(3).integers(1, 9, (6, 6)).astype(float)
    np.fill_diagonal(wins, 0.0)
    assert scores(wins, 1e4) == pytest.approx(hunter(wins), abs=1e-6)


@pytest.mark.parametrize("prior_std", [0.3, 1.0, 3.0])
def test_they_are_where_the_posterior_is_highest(prior_std: float) -> None:
    """Central differences of the objective, written again by loops, vanish; the mean is 0."""
    wins = np.random.default_rng(5).integers(0, 3, (5, 5)).astype(float)
    np.fill_diagonal(wins, 0.0)
    theta = scores(wins, prior_std)

    def objective(at: np.ndarray) -> float:
        likelihood = sum(
            wins[i, j] * -math.log1p(math.exp(at[j] - at[i])) for i in range(5) for j in range(5) if i != j
        )
        return likelihood - sum(x * x for x in at) / (2 * prior_std**2)

    for axis in np.eye(5) * 1e-4:
        assert objective(theta + axis) - objective(theta - axis) == pytest.approx(0.0, abs=1e-10)
        assert objective(theta) > max(objective(theta + axis), objective(theta - axis))
    assert theta.mean() == pytest.approx(0.0, abs=1e-12)


def test_few_votes_give_finite_scores_and_no_vote_gives_none_apart() -> None:
    chain = np.zeros((12, 12))
    chain[np.arange(11), np.arange(1, 12)] = 1.0  # each won its only comparison with the next
    theta = scores(chain, 1.0)
    assert np.isfinite(theta).all()
    assert (np.diff(theta) < 0).all()
    assert scores(np.zeros((3, 3)), 1.0).tolist() == [0.0] * 3
    assert preferred(np.array([800.0, -800.0])).tolist() == [[0.5, 1.0], [0.0, 0.5]]


def vote(left: int, right: int, choice: Choice, voter: str = "ann") -> Vote:
    return Vote(step=3, group=1, left=left, right=right, choice=choice, id="12345678", voter=voter, time=NOW)


def test_a_tie_is_half_a_preference_each_way() -> None:
    votes = [vote(4, 7, "left"), vote(9, 7, "left"), vote(9, 4, "tie"), vote(4, 9, "neither"), vote(4, 5, "left")]
    expected = [[0, 1, 1], [0, 0, 0], [1, 1, 0]]  # of 4, 7 and 9; 5 is not of the group
    assert win_table(votes, [4, 7, 9]).tolist() == expected


@pytest.mark.parametrize(
    ("each", "size", "wanted"), [(2, 2, 1), (2, 8, 8), (1, 8, 7), (0.1, 8, 7), (3, 8, 12), (99, 4, 6), (5, 3, 3)]
)
def test_votes_that_a_group_wants(each: float, size: int, wanted: int) -> None:
    assert HumanParams(each).wanted(size) == wanted


def samples(count: int, group: int = 1, job: str = JOB) -> list[EncodedSample]:
    return [EncodedSample(b"", "image/png", "a sign", {}, f"3/{group}", f"{job}/3/{group}/{i}") for i in range(count)]


def scorer(answer: Callable[[httpx.Request], httpx.Response]) -> HumanScorer:
    found = make("human", {}, 1)
    assert isinstance(found, HumanScorer)
    found._client = AsyncClient("http://controller", transport=httpx.MockTransport(answer))
    return found


def group(request: httpx.Request, votes: list[Vote], complete: bool) -> httpx.Response:
    step, number = map(int, request.url.path.split("/")[-2:])
    body = json.loads(request.content) | {"step": step, "group": number, "asked_at": NOW.isoformat()}
    body |= {"complete": complete, "votes": [one.model_dump(mode="json") for one in votes]}
    return httpx.Response(200, json=body)


async def test_groups_of_one_call_are_asked_for_apart_and_one_may_wait() -> None:
    asked: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path, json.loads(request.content)))
        is_ready = request.url.path.endswith("/1")
        votes = [vote(0, 1, "left"), vote(1, 2, "left"), vote(1, 0, "left")]  # the last one repeats the first
        return group(request, votes if is_ready else votes[:1], is_ready)

    one, other = samples(3), samples(3, group=2)
    mixed = [sample for pair in zip(one, other, strict=True) for sample in pair]
    found = await scorer(answer).score(mixed, HumanParams())
    assert [type(outcome) for outcome in found] == [Score, Pending] * 3
    assert found[1] == Pending("people gave 1 of 3 votes on group 3/2")
    best, middle, worst = found[::2]
    assert isinstance(best, Score)
    assert isinstance(middle, Score)
    assert isinstance(worst, Score)
    expected = scores(np.array([[0, 1, 0], [0, 0, 1], [0, 0, 0.0]]), 1.0)
    assert [best.value, middle.value, worst.value] == pytest.approx(list(expected))
    chance = [1 / (1 + math.exp(expected[k] - expected[0])) for k in (1, 2)]
    assert best.components == pytest.approx({"win_rate": sum(chance) / 2, "votes": 1.0})
    assert middle.components["votes"] == 2.0
    (method, path, body) = sorted(asked, key=lambda call: call[1])[0]
    assert (method, path) == ("PUT", f"/v1/jobs/{JOB}/votes/groups/3/1")
    assert (body["prompt"], body["wanted"], [each["index"] for each in body["samples"]]) == ("a sign", 3, [0, 1, 2])


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(404, Pending), (409, Problem), (401, Unavailable), (403, Unavailable), (500, Unavailable)],
)
async def test_what_a_refusal_means(status: int, outcome: Any) -> None:
    service = scorer(lambda request: httpx.Response(status, json={"detail": "because"}))
    if outcome is Unavailable:
        with pytest.raises(Unavailable, match=r"because" + (".*FLOWFLEET_API_KEY" if status < 500 else "")):
            await service.score(samples(2), HumanParams())
    else:
        found = await service.score(samples(2), HumanParams())
        assert [type(one) for one in found] == [outcome] * 2
        assert "because" in found[0].message  # type: ignore[union-attr]


@pytest.mark.parametrize("job", ["check", "a/b", "job ü", "../../x"])
async def test_samples_of_no_job_wait_without_a_question(job: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise AssertionError(request.url)

    strange = [EncodedSample(b"", "image/png", "", {}, "g", f"{job}/{place}") for place in range(2)]
    found = await scorer(answer).score(strange, HumanParams())
    assert found == [Pending("only groups of a job's samples can be voted on")] * 2


@pytest.mark.parametrize("text", ["0", "-1", "nan", "many", "1e9"])
def test_params_are_checked(text: str) -> None:
    service = make("human", {}, 1)
    assert service.parse({"votes_per_sample": "2.5"}) == HumanParams(2.5)
    with pytest.raises(ValueError, match="votes_per_sample"):
        service.parse({"votes_per_sample": text})
