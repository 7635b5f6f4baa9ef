"""Pairs for preference losses, against the definition."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.algorithms.preferences import Pair, make_pairs


def test_best_meets_worst_and_second_best_second_worst() -> None:
    rewards = [0.2, 0.9, 0.5, 0.1, 0.7, 0.3]
    assert make_pairs(rewards, [0] * 6) == [Pair(1, 3, 0)]
    assert make_pairs(rewards, [0] * 6, 3) == [Pair(1, 3, 0), Pair(4, 0, 1), Pair(2, 5, 2)]
    assert make_pairs(rewards, [0] * 6, 10) == make_pairs(rewards, [0] * 6, 3)


def test_groups_keep_to_themselves_in_the_order_of_their_first_samples() -> None:
    assert make_pairs([3.0, 1.0, 2.0, 5.0], ["b", "a", "b", "a"]) == [Pair(0, 2, 0), Pair(3, 1, 0)]


def test_what_prefers_nothing_gives_no_pair() -> None:
    assert make_pairs([0.5, 0.5, 0.5, 1.0], [0, 0, 0, 1]) == []  # all equal, and a group of one
    assert make_pairs([1.0, 0.5, 0.5, 0.0], [0] * 4, 2) == [Pair(0, 3, 0)]  # the inner two are equal
    assert make_pairs([], []) == []


def test_equal_rewards_rank_by_position() -> None:
    assert make_pairs([1.0, 1.0, 0.0, 0.0], [0] * 4, 2) == [Pair(0, 3, 0), Pair(1, 2, 1)]


@settings(max_examples=60, deadline=None)
@given(
    samples=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30),
    pairs_per_group=st.integers(1, 4),
)
def test_pairs_are_the_nested_gaps_of_each_group(samples: list[tuple[int, int]], pairs_per_group: int) -> None:
    rewards, groups = [float(reward) for reward, _ in samples], [group for _, group in samples]
    pairs = make_pairs(rewards, groups, pairs_per_group)
    used = [index for pair in pairs for index in (pair.winner, pair.loser)]
    assert len(used) == len(set(used))
    for group in set(groups):
        ordered = sorted(reward for reward, g in zip(rewards, groups, strict=True) if g == group)
        gaps = [(ordered[-1 - i], ordered[i]) for i in range(min(pairs_per_group, len(ordered) // 2))]
        mine = [pair for pair in pairs if groups[pair.winner] == group]
        assert all(groups[pair.loser] == group for pair in mine)
        assert [(rewards[pair.winner], rewards[pair.loser]) for pair in mine] == [
            gap for gap in gaps if gap[0] > gap[1]
        ]
        assert [pair.number for pair in mine] == list(range(len(mine)))


@pytest.mark.parametrize(
    ("rewards", "groups", "pairs", "message"),
    [
        ([1.0], [], 1, "one group id a sample"),
        ([1.0, math.nan], [0, 0], 1, "finite"),
        ([1.0, 2.0], [0, 0], 0, "at least 1"),
    ],
)
def test_bad_input_is_refused(rewards: list[float], groups: list[int], pairs: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_pairs(rewards, groups, pairs)
