"""Which samples scorers disagree about, against the definition."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.api.samples import Sample
from flowfleet.cli.rewards.disagreement import disagreements, rewards_of


def sample(index: int, group: int = 0, step: int = 0, **fields: Any) -> Sample:
    return Sample(step=step, group=group, index=index, prompt="", **fields)


def group(ocr: list[float], clip: list[float], number: int = 0) -> list[Sample]:
    return [sample(i, number, scores={"ocr": a, "clip": b}) for i, (a, b) in enumerate(zip(ocr, clip, strict=True))]


def test_the_sample_at_opposite_ends_comes_first() -> None:
    """Places of ocr: 0, 1/3, 2/3, 1; of clip: 1, 0, 1/3, 2/3; differences 1, 1/3, 1/3, 1/3."""
    first, *others = disagreements(group([0.0, 0.1, 0.2, 0.3], [40.0, 10.0, 20.0, 30.0]))
    assert first.sample.index == 0
    assert (first.higher.scorer, first.higher.rank, first.higher.of) == ("clip", 1.0, 4)
    assert (first.lower.scorer, first.lower.rank) == ("ocr", 4.0)
    assert first.size[0] == 1.0
    assert [one.size[0] for one in others] == pytest.approx([1 / 3] * 3)


def test_units_do_not_matter_and_groups_are_apart() -> None:
    """The same order in each group, whatever the level of the group: no scorer disagrees about places."""
    found = disagreements(
        [*group([0.0, 1.0], [5.0, 900.0]), *group([0.9, 1.0], [-7.0, -6.0], 1)],
    )
    assert found == []


def test_equal_places_are_told_apart_by_standardized_scores() -> None:
    """Both order them alike; the middle one of three is near the top for the one, near the bottom for the other."""
    found = disagreements(group([0.0, 0.9, 1.0], [0.0, 0.1, 1.0]))
    assert found[0].sample.index == 1
    assert found[0].size[0] == 0.0
    high, low = (
        (value - statistics.fmean(all_)) / statistics.pstdev(all_)
        for value, all_ in (
            (0.9, [0.0, 0.9, 1.0]),
            (0.1, [0.0, 0.1, 1.0]),
        )
    )
    assert found[0].size[1] == pytest.approx(high - low)


def test_ties_share_their_place() -> None:
    found = disagreements(group([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))
    assert {one.sample.index: one.size[0] for one in found} == {0: 0.5, 2: 0.5}


def test_a_shadow_is_held_against_its_reward_alone() -> None:
    members = [
        sample(i, scores={"ocr": a, "clip": b}, shadow={"new": c, "other": 0.0})
        for i, (a, b, c) in enumerate([(0.0, 0.0, 1.0), (1.0, 1.0, 0.0)])
    ]
    for one in disagreements(members, {"new": "ocr", "other": "ocr"}):
        assert {one.higher.scorer, one.lower.scorer} == {"new", "ocr"}
        assert {one.higher.is_shadow, one.lower.is_shadow} == {True, False}
    anything = disagreements(
        [sample(0, scores={"a": 0.0}, shadow={"s": 1.0}), sample(1, scores={"a": 1.0}, shadow={"s": 0.0})]
    )
    assert len(anything) == 2


def test_prompts_of_a_validation_are_one_group() -> None:
    found = disagreements([sample(0, g, purpose="validate", scores={"a": g, "b": -g}) for g in range(3)])
    assert {(one.sample.group, one.size[0]) for one in found} == {(0, 1.0), (2, 1.0)}


def test_components_are_no_scorers_and_what_was_not_scored_is_left_out() -> None:
    one = sample(0, scores={"ocr": 0.5, "ocr.exact": 1.0, "v1.2": 0.1, "gone": None})
    assert rewards_of(one) == {"ocr": 0.5, "v1.2": 0.1}
    for few in ([], [one.model_copy(update={"scores": {"ocr": 0.5, "ocr.exact": 1.0}})]):
        with pytest.raises(ValueError, match="a job of two rewards, or one with a shadow"):
            disagreements(few)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=9))
def test_places_are_those_of_counting(scores: list[tuple[int, int]]) -> None:
    """A place is the share of the others that are lower, ties by half."""

    def place(values: list[int], at: int) -> float:
        others = [value for i, value in enumerate(values) if i != at]
        return statistics.fmean((value < values[at]) + (value == values[at]) / 2 for value in others)

    first, second = ([float(pair[side]) for pair in scores] for side in (0, 1))
    found = {one.sample.index: one for one in disagreements(group(first, second))}
    for at in range(len(scores)):
        expected = abs(place([a for a, _ in scores], at) - place([b for _, b in scores], at))
        assert (found[at].size[0] if at in found else 0.0) == pytest.approx(expected)
    sizes = [one.size for one in found.values()]
    assert sizes == sorted(sizes, reverse=True)
