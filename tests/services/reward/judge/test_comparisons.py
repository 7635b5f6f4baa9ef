"""Pairs and rankings, against closed forms and SciPy-free optimality conditions."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.judge.comparisons import (
    PRIOR_WINS,
    borda,
    bradley_terry,
    choose_lists,
    choose_pairs,
    parse_ranking,
    seeded,
    win_rates,
)


@given(st.integers(2, 24), st.integers(1, 300), st.integers())
@settings(deadline=None, max_examples=20)
def test_chosen_pairs_are_distinct_bounded_and_reach_all(count: int, most: int, seed: int) -> None:
    pairs = choose_pairs(count, most, random.Random(seed))
    every = count * (count - 1) // 2
    assert len(set(pairs)) == len(pairs) == min(every, max(most, count))
    assert all(first < second for first, second in pairs)
    reached = {0}
    for _ in range(count):
        reached |= {place for pair in pairs if reached & set(pair) for place in pair}
    assert reached == set(range(count))


def test_the_choice_depends_on_the_content_alone() -> None:
    one, again = (choose_pairs(20, 30, seeded([b"a", b"b"], "p")) for _ in range(2))
    assert one == again
    assert one != choose_pairs(20, 30, seeded([b"a", b"c"], "p"))


def test_two_samples_have_a_closed_form() -> None:
    """The closed form is s = (x, −x) by symmetry; bisection finds x, where the slope of the log-posterior is 0."""
    won = 0.8

    def slope(x: float) -> float:
        def sigma(z: float) -> float:
            return 1 / (1 + math.exp(-z))

        return won - sigma(2 * x) + PRIOR_WINS * (1 - 2 * sigma(x))

    low, high = 0.0, 5.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    assert bradley_terry(2, [(0, 1)], [won]) == pytest.approx([low, -low], abs=1e-8)


@given(st.integers(2, 8), st.integers())
@settings(deadline=None, max_examples=10)
def test_the_order_of_a_clear_tournament_is_found_and_its_mean_is_zero(count: int, seed: int) -> None:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    pairs = list(itertools.combinations(range(count), 2))
    wins = [float(order[first] > order[second]) for first, second in pairs]
    strengths = bradley_terry(count, pairs, wins)
    assert np.argsort(strengths).tolist() == np.argsort(order).tolist()
    assert strengths.mean() == pytest.approx(0.0, abs=1e-9)
    assert win_rates(count, pairs, wins) == pytest.approx(np.array(order) / (count - 1))


def test_ties_are_level_and_the_absent_have_none() -> None:
    assert bradley_terry(3, [(0, 1)], [0.5]) == pytest.approx([0.0, 0.0, math.nan], nan_ok=True)
    assert win_rates(3, [(0, 1)], [0.25]) == pytest.approx([0.25, 0.75, math.nan], nan_ok=True)


@given(st.integers(2, 40), st.integers(3, 10), st.integers())
@settings(deadline=None, max_examples=20)
def test_lists_hold_everyone_once_and_nobody_alone(count: int, size: int, seed: int) -> None:
    lists = choose_lists(count, size, random.Random(seed))
    assert sorted(itertools.chain(*lists)) == list(range(count))
    assert all(2 <= len(order) <= size for order in lists)


@pytest.mark.parametrize("text", ["2, 3, 1", "2 > 3 > 1", "[2,3,1]", "2\n3\n1"])
def test_rankings_are_read(text: str) -> None:
    assert parse_ranking(text, 3) == [1, 2, 0]


@pytest.mark.parametrize("text", ["", "1, 2", "1, 2, 2", "1, 2, 4", "1, 2, 3, 4"])
def test_what_is_no_ranking_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="each number from 1 to 3"):
        parse_ranking(text, 3)


def test_borda_counts_places() -> None:
    assert borda(4, [[0, 1, 2], [2, 0]]) == pytest.approx([0.5, 0.5, 0.5, math.nan], nan_ok=True)
