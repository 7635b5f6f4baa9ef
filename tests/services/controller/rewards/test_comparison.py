"""The comparison of a shadow against definitions, counted pair by pair, and textbook cases."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.ranks import ranks
from services.controller.rewards.comparison import GroupScores, agreement, compare, spearman

SCORES = st.sampled_from([0.0, 0.25, 0.5, 1.0, -3.0, 1e-3])
"""Few values, so that many are equal."""
PAIRS = st.lists(st.tuples(SCORES, SCORES), min_size=1, max_size=7)


def groups_of(table: list[list[tuple[float, float]]]) -> list[GroupScores]:
    return [
        GroupScores(step=0, group=number, active=[a for a, _ in rows], shadow=[b for _, b in rows])
        for number, rows in enumerate(table)
    ]


@given(st.lists(SCORES, min_size=1, max_size=20))
def test_a_rank_is_one_more_than_what_is_less_and_half_of_what_else_is_equal(values: list[float]) -> None:
    expected = [sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values]
    assert ranks(np.array(values)).tolist() == expected


def test_spearman_by_the_textbook() -> None:
    """Without ties it is 1 - 6 Σ d² / (n (n² - 1)); IQ and hours of TV of Wikipedia's example give -29/165."""
    iq = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110]
    hours = [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    assert spearman(np.array(iq, float), np.array(hours, float)) == pytest.approx(-29 / 165, rel=1e-12)


@given(st.lists(st.tuples(SCORES, SCORES), min_size=2, max_size=20))
def test_spearman_is_the_correlation_of_the_ranks(rows: list[tuple[float, float]]) -> None:
    left, right = (np.array(column) for column in zip(*rows, strict=True))
    found = spearman(left, right)
    if len(set(left)) == 1 or len(set(right)) == 1:
        assert found is None
    else:
        expected = statistics.correlation(ranks(left).tolist(), ranks(right).tolist())
        assert found == pytest.approx(expected, abs=1e-12)


@given(st.lists(PAIRS, min_size=1, max_size=4))
def test_agreement_is_counted_pair_by_pair(table: list[list[tuple[float, float]]]) -> None:
    points: list[float] = []
    for rows in table:
        for (a, b), (c, d) in itertools.combinations(rows, 2):
            if a == c and b == d:
                continue
            points.append(0.5 if a == c or b == d else float((a < c) == (b < d)))
    expected = sum(points) / len(points) if points else None
    assert agreement(groups_of(table)) == pytest.approx(expected)


def test_a_shadow_that_always_says_the_same_agrees_with_half() -> None:
    same = groups_of([[(0.1, 1.0), (0.2, 1.0), (0.3, 1.0)]])
    found = compare(same)
    assert (found.agreement, found.spearman) == (0.5, None)
    assert (found.active.zero_std_ratio, found.shadow.zero_std_ratio) == (0.0, 1.0)
    opposite = groups_of([[(0.1, 3.0), (0.2, 2.0), (0.3, 1.0)]])
    assert (compare(opposite).agreement, compare(opposite).spearman) == (0.0, pytest.approx(-1.0))


def test_groups_are_not_compared_with_each_other() -> None:
    """A prompt may be easier for one of the two; only the order inside a group teaches."""
    found = compare(groups_of([[(0.1, 5.0), (0.2, 6.0)], [(0.3, 1.0), (0.4, 2.0)]]))
    assert found.agreement == 1.0
    assert found.spearman is not None
    assert found.spearman < 0


def test_distribution_and_latency() -> None:
    seconds = [0.1 * step for step in range(101)]
    groups = [
        GroupScores(
            step=step,
            group=0,
            active=[float(step)],
            shadow=[2.0],
            failed=step % 2,
            active_s=second,
            shadow_s=None,
            active_version="ocr 1",
            shadow_version=f"ocr {2 + step % 2}",
        )
        for step, second in enumerate(seconds)
    ]
    found = compare(groups[::-1])
    assert (found.samples, found.groups, found.failed, found.first_step, found.last_step) == (101, 101, 50, 0, 100)
    active = found.active
    assert (active.mean, active.min, active.max) == (50.0, 0.0, 100.0)
    assert active.std == pytest.approx(math.sqrt((101**2 - 1) / 12))  # of 0 … n - 1
    assert [active.q05, active.q25, active.q50, active.q75, active.q95] == [5.0, 25.0, 50.0, 75.0, 95.0]
    assert (active.latency_p50_s, active.latency_p99_s) == (pytest.approx(5.0), pytest.approx(9.9))
    assert (found.shadow.std, found.shadow.latency_p50_s) == (0.0, None)
    assert active.zero_std_ratio is None  # one sample has no order to learn from
    assert (active.versions, found.shadow.versions) == (["ocr 1"], ["ocr 2", "ocr 3"])
    assert compare(groups) == found


def test_nothing_gives_nothing() -> None:
    found = compare([])
    assert (found.samples, found.spearman, found.agreement, found.active.mean) == (0, None, None, None)
