"""Scores that come later: asked for again, never a failure, until the job's own limit. Real gRPC servers, the test's
clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from flowfleet.job.spec import RewardPart
from flowfleet.proto import reward_pb2
from services.controller.rewards.failures import RewardFailure, RewardPause, RewardPending
from services.controller.rewards.outages import MAX_PENDING_S
from tests.services.controller.reward_fleet import PATIENCE_S, PENDING_S, Fleet, Service, samples, with_services


class People(Service):
    """Scores once `votes` are enough, but only sample "a" before."""

    def __init__(self) -> None:
        super().__init__(contract=2)
        self.votes = 0
        self.answers = self._judged

    def _judged(self, asked: Sequence[reward_pb2.RewardSample]) -> list[reward_pb2.RewardScore]:
        return [
            reward_pb2.RewardScore(sample_id=one.sample_id, score=1.0)
            if self.votes >= 2 or one.sample_id == "a"
            else reward_pb2.RewardScore(sample_id=one.sample_id, pending=f"{self.votes} of 2 votes")
            for one in asked
        ]


async def wait_in_vain(fleet: Fleet, rewards: dict[str, RewardPart], *names: str) -> None:
    """Asks as often as the driver would, until the limit."""
    for _ in range(int(PENDING_S // MAX_PENDING_S) + 1):
        with pytest.raises(RewardPending):
            await fleet.score(rewards, 0, samples(*names))
        fleet.now += MAX_PENDING_S


async def test_pending_scores_are_waited_for_beyond_the_patience_with_failures() -> None:
    people, other = People(), Service()
    rewards = {"people": RewardPart(), "other": RewardPart()}
    async with with_services({"people": people, "other": other}) as fleet:
        for waited in (0.0, PATIENCE_S, 3 * PATIENCE_S, 4.5 * PATIENCE_S):
            fleet.now = 1000.0 + waited
            people.votes = int(waited > 0)
            with pytest.raises(RewardPending, match=rf"^rewards.people waits: {people.votes} of 2 votes$") as found:
                await fleet.score(rewards, 0, samples("a", "b"))
            assert found.value.again_s == pytest.approx(min(max(waited / 10, 0.5), 30.0))
        people.votes = 2
        fleet.now += 30.0
        verdicts = await fleet.score(rewards, 0, samples("a", "b"))
        assert {verdict.score for verdict in verdicts.values()} == {2.0}
        assert (people.sizes, other.sizes) == ([2] * 5, [2])  # whole groups; the other reward once
        assert fleet.counted("failures", reward="people") == 0
        assert fleet.counted("rejected_samples", reward="people", fault="pending") == 0


async def test_a_reward_is_not_asked_before_it_is_due_and_no_picture_is_fetched() -> None:
    people = People()
    async with with_services({"people": people}) as fleet:
        for later in (0.0, 0.3, 0.3):  # the second is too early
            fleet.now += later
            with pytest.raises(RewardPending) as found:
                await fleet.score({"people": RewardPart()}, 0, samples("b"))
            assert 0.0 < found.value.again_s <= 0.5
        assert (len(people.sizes), fleet.fetched) == (2, 2)


@pytest.mark.parametrize("policy", ["drop", "skip"])
async def test_after_the_limit_the_samples_go_without(policy: Any) -> None:
    rewards = {"people": RewardPart(on_failure=policy), "other": RewardPart()}
    async with with_services({"people": People(), "other": Service()}) as fleet:
        await wait_in_vain(fleet, rewards, "a", "b")
        verdicts = await fleet.score(rewards, 0, samples("a", "b"))
        expected = {"drop": (None, "no_score_people"), "skip": (1.0, "")}[policy]
        assert {(one.score, one.reason) for one in verdicts.values()} == {expected}
        assert fleet.counted("given_up_samples", reward="people", policy=policy) == 2
        with pytest.raises(RewardPending):  # the service is healthy: other samples have their own time
            await fleet.score(rewards, 0, samples("c"))


async def test_or_the_job_pauses_and_waits_as_long_again_when_it_is_resumed() -> None:
    rewards = {"people": RewardPart()}
    async with with_services({"people": People()}) as fleet:
        for _ in range(2):
            await wait_in_vain(fleet, rewards, "b")
            with pytest.raises(RewardPause, match=r"timeouts\.pending_s = 500 s: 0 of 2 votes.*resume it"):
                await fleet.score(rewards, 0, samples("b"))


async def test_a_failure_beside_it_is_told_first() -> None:
    bad = Service()
    bad.code = grpc.StatusCode.INTERNAL
    async with with_services({"people": People(), "zbad": bad}) as fleet:
        with pytest.raises(RewardFailure, match="bad"):
            await fleet.score({"people": RewardPart(), "zbad": RewardPart()}, 0, samples("b"))
