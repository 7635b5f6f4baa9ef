"""Several sources: which groups of a step each of them has, and which prompts."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.job.data import DataPart
from flowfleet.prompts.prompt import Prompt
from services.controller.prompts.data import Deal
from services.controller.prompts.mixture import BLOCK, Mixture


def mixture_of(*sources: dict[str, Any], seed: int = 7, count: int = 32) -> Mixture:
    parts = [{"name": f"s{k}", "path": f"{k}.txt", **source} for k, source in enumerate(sources)]
    return Mixture(DataPart.model_validate({"sources": parts}).each, seed, count)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    st.integers(1, 40),
    st.integers(0, 2**40),
    st.integers(0, 3 * BLOCK),
    st.integers(1, 50),
)
def test_each_source_gets_its_share_of_every_stretch_of_steps(
    weights: list[int], count: int, seed: int, start: int, length: int
) -> None:
    mixture = mixture_of(*({"weight": weight} for weight in weights), seed=seed, count=count)
    given = [Counter(mixture.of_step(step).tolist()) for step in range(start, start + length)]
    assert all(one.total() == count for one in given)
    for source, weight in enumerate(weights):
        share = Fraction(weight, sum(weights)) * count
        for one in given:
            assert abs(one[source] - share) < 1 + Fraction(1, 10**6)
        assert abs(sum(one[source] for one in given) - share * length) <= 6, "golden ratio: the error does not add up"
        if weight == 0:
            assert not any(one[source] for one in given)


def test_a_curriculum_moves_the_mixture_from_easy_to_hard() -> None:
    easy = {"name": "easy", "curve": [[0, 1], [100, 1], [300, 0]]}
    hard = {"name": "hard", "curve": [[100, 0], [300, 1]]}
    mixture = mixture_of(easy, hard, count=32)

    def hard_at(step: int) -> int:
        return int(mixture.of_step(step).sum())

    assert {hard_at(step) for step in range(101)} == {0}
    assert {hard_at(step) for step in (300, 301, 5000)} == {32}
    for step in range(100, 301):
        assert abs(hard_at(step) - 32 * (step - 100) / 200) < 1
    assert sum(hard_at(step) for step in range(100, 300)) == pytest.approx(16 * 200, abs=40)


def test_the_groups_of_a_source_are_spread_over_the_step() -> None:
    """Updates of a step take its groups in order: no source may have an update of its own."""
    mixture = mixture_of({}, {}, count=64)
    for step in range(20):
        first = int(mixture.of_step(step)[:32].sum())
        assert 6 <= first <= 26


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(1, 9), st.integers(0, 2**40), st.data())
def test_what_a_step_gets_depends_on_seed_and_step_alone(
    sizes: list[int], count: int, seed: int, data: st.DataObject
) -> None:
    """A deal that saw all steps and one that begins at a step agree; every source is dealt pass by pass."""
    weights = [{"weight": k + 1, "curve": [[0, 1], [9, 2 + k]]} for k in range(len(sizes))]
    prompts = [[Prompt(f"{source}/{k}") for k in range(size)] for source, size in enumerate(sizes)]
    whole = Deal(prompts, mixture_of(*weights, seed=seed, count=count))
    dealt = [prompt.text for step in range(60) for prompt in whole.of_step(step)]
    for source, size in enumerate(sizes):
        own = [text for text in dealt if text.startswith(f"{source}/")]
        for start in range(0, len(own) - size + 1, size):
            assert len(set(own[start : start + size])) == size, "a pass gives every prompt of a source once"
    step = data.draw(st.integers(0, 59))
    resumed = Deal(prompts, mixture_of(*weights, seed=seed, count=count))
    assert resumed.of_step(step) == whole.of_step(step)


def test_the_first_of_the_sources_is_dealt_as_data_train_is() -> None:
    prompts = [Prompt(str(k)) for k in range(10)]
    short = Mixture(DataPart(train="t.txt").each, 3, 4)
    assert [Deal([prompts], short).of_step(s) for s in range(9)] == [
        Deal([prompts], mixture_of({}, seed=3, count=4)).of_step(s) for s in range(9)
    ]


def test_a_step_far_away_is_counted_in_blocks() -> None:
    mixture = mixture_of({"weight": 1}, {"weight": 2, "curve": [[0, 1], [5000, 4]]}, count=8)
    steps = np.arange(3 * BLOCK + 17)
    np.testing.assert_array_equal(mixture.before(len(steps)), mixture.counts(steps).sum(axis=0))
    np.testing.assert_array_equal(mixture.before(0), [0, 0])
