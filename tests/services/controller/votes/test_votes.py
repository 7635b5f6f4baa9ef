"""Which pairs voters get, and what their votes come to. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from flowfleet.api.votes import Choice, Vote, VoteGroup, VoteSample, counted
from services.controller.votes import pairing
from services.controller.votes.pairing import Shown, is_complete, next_pairs, preferred
from services.controller.votes.report import report

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def group(size: int, votes: Sequence[Vote] = (), wanted: int = 0, step: int = 0, complete: bool = False) -> VoteGroup:
    return VoteGroup(
        prompt="a sign",
        samples=[VoteSample(index=index) for index in range(size)],
        wanted=wanted or size,
        step=step,
        group=0,
        asked_at=NOW,
        votes=list(votes),
        complete=complete,
    )


def vote(voter: str, left: int, right: int, choice: Choice = "left") -> Vote:
    return Vote(step=0, group=0, left=left, right=right, choice=choice, id="12345678", voter=voter, time=NOW)


def answer(one: Shown, voter: str, choice: Choice = "left") -> Vote:
    return vote(voter, one.left, one.right, choice)


@pytest.fixture(autouse=True)
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "CHECK_SHARE", 0.0)


@pytest.mark.parametrize("size", [2, 3, 8, 33])
def test_one_voter_connects_all_samples_with_one_vote_less_than_there_are(size: int) -> None:
    draw, votes = random.Random(size), list[Vote]()
    for number in range(size - 1):
        assert not is_complete(range(size), votes, size - 1), number
        (shown,) = next_pairs([group(size, votes)], [], "ann", 1, draw)
        votes.append(answer(shown, "ann"))
    assert is_complete(range(size), votes, size - 1)


def test_a_batch_is_what_single_requests_would_be_and_no_pair_comes_twice() -> None:
    found = next_pairs([group(4, wanted=6), group(3, wanted=3, step=1)], [], "ann", 20, random.Random(3))
    places = [(one.group.step, *sorted((one.left, one.right))) for one in found]
    pairs = [*itertools.combinations(range(4), 2)], [*itertools.combinations(range(3), 2)]
    assert sorted(places) == sorted([(step, *pair) for step in (0, 1) for pair in pairs[step]])
    assert [place[0] for place in places] == [0] * 6 + [1] * 3  # the oldest group first


def test_pairs_spread_over_samples_and_both_sides() -> None:
    draw, votes = random.Random(7), list[Vote]()
    for _ in range(32):
        (shown,) = next_pairs([group(16, votes, wanted=32)], [], "ann", 1, draw)
        votes.append(answer(shown, "ann"))
    degrees = [sum(index in one.pair for one in votes) for index in range(16)]
    assert min(degrees) >= 3
    assert len({one.pair for one in votes}) == 32
    assert 4 <= sum(one.left < one.right for one in votes) <= 28


def test_two_voters_at_once_get_other_pairs_where_there_are_any() -> None:
    known = [vote("ann", 0, 1), vote("ann", 1, 2)]
    (shown,) = next_pairs([group(3, known, wanted=3)], [], "bob", 1, random.Random(1))
    assert {shown.left, shown.right} == {0, 2}


def test_some_pairs_come_again_and_the_others_of_the_group_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "CHECK_SHARE", 0.25)
    draw = random.Random(5)
    ended = [group(2, [vote("ann", 0, 1)], step=1, complete=True), group(2, [vote("bob", 1, 0)], step=2, complete=True)]
    found = list[Shown]()
    for _ in range(400):
        found += next_pairs([group(8, step=9)], ended, "ann", 1, draw)
    again = [one for one in found if one.group.step != 9]
    assert 60 <= len(again) <= 140  # binomial, 100 ± 4.6 standard deviations
    own = [one for one in again if one.group.step == 1]
    assert {(one.left, one.right) for one in own} == {(1, 0)}  # the other way round than before
    assert 0.25 <= len(own) / len(again) <= 0.75


def test_a_pair_that_the_voter_repeated_does_not_come_a_third_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "CHECK_SHARE", 1.0)
    ended = [group(2, [vote("ann", 0, 1), vote("ann", 1, 0)], step=1, complete=True)]
    assert next_pairs([], ended, "ann", 1, random.Random(1)) == []


def test_repeats_measure_the_voter_and_do_not_count_for_the_group() -> None:
    votes = [vote("ann", 0, 1), vote("ann", 1, 0, "right"), vote("bob", 0, 1, "right")]
    assert counted(votes) == [votes[0], votes[2]]
    assert not is_complete([0, 1], votes[:2], 2)
    assert is_complete([0, 1], votes, 2)
    assert not is_complete([0, 1, 2], votes, 2)  # nothing tells of sample 2


def test_the_report_tells_consistency_agreement_and_rewards() -> None:
    votes = [
        vote("ann", 0, 1),  # ann prefers 0
        vote("ann", 1, 0, "right"),  # the same again, sides exchanged
        vote("ann", 1, 2),
        vote("ann", 2, 1, "left"),  # and now 2
        vote("bob", 1, 0, "left"),  # bob prefers 1
        vote("bob", 1, 2, "left"),
    ]
    scores = {(0, 0, index): {"ocr": value, "flat": 1.0} for index, value in enumerate((0.9, 0.5, 0.7))}
    found = report([group(3, votes)], scores, guarded=True)
    ann, bob = found.voters
    assert (ann.name, ann.votes, ann.repeats, ann.consistency) == ("ann", 4, 2, 0.5)
    assert (bob.name, bob.votes, bob.repeats, bob.consistency) == ("bob", 2, 0, None)
    assert (ann.shared, ann.agreement, found.agreement) == (2, 0.5, 0.5)  # they differ on 0 and 1 alone
    # counted: ann 0>1 (ocr agrees), ann 1>2 (not), bob 1>0 (not), bob 1>2 (not)
    assert (found.rewards["ocr"].pairs, found.rewards["ocr"].agreement) == (4, 0.25)
    assert found.rewards["flat"].agreement == 0.5
    assert found.warnings == []


def test_the_report_warns_of_a_lone_guard_and_of_voters_by_chance() -> None:
    groups = [
        group(2, [vote("ann", 0, 1), vote("ann", 0, 1, "right" if step % 2 else "left")], step=step)
        for step in range(10)
    ]
    lone, voter = report(groups, {}, guarded=False).warnings
    assert "only guard" in lone
    assert voter.startswith("ann chose the same in 50% of 10 pairs")


def test_preferences_are_what_most_votes_decide() -> None:
    votes = [
        vote("ann", 2, 0),
        vote("bob", 0, 2, "right"),
        vote("cid", 0, 2),  # 2 over 0 by one
        vote("ann", 0, 1),
        vote("bob", 0, 1, "right"),  # undecided
        vote("ann", 1, 2, "tie"),
        vote("bob", 1, 2, "neither"),
    ]
    assert [*preferred(group(3, votes))] == [(2, 0, 1)]
