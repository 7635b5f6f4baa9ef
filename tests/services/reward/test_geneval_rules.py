"""geneval's rules by hand-made detections: every expected number follows from the definitions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.scorers.geneval.rules import (
    Box,
    Detection,
    Request,
    is_correct,
    judge,
    kept,
    needs_colors,
    overlap,
    read_request,
    relations,
)

LEFT, RIGHT = (0.0, 40.0, 20.0, 60.0), (80.0, 40.0, 100.0, 60.0)


def request(*include: dict[str, Any], exclude: tuple[dict[str, Any], ...] = (), tag: str = "") -> Request:
    return read_request({"geneval": json.dumps({"tag": tag, "include": include, "exclude": exclude})})


def found(**boxes: list[Box]) -> dict[str, list[Detection]]:
    return {
        name: [Detection(box, 0.9 - 0.01 * place) for place, box in enumerate(some)] for name, some in boxes.items()
    }


@pytest.mark.parametrize(
    ("number", "partial", "strict", "correct"),
    [
        (0, 0.0, False, False),
        (1, 0.5, False, False),
        (2, 1.0, True, True),
        (3, 0.5, False, True),
        (5, -0.5, False, True),
    ],
)
def test_counts(number: int, partial: float, strict: bool, correct: bool) -> None:
    """1 − |2 − n| / 2, as in flow_grpo; the benchmark lets more than two pass where they are not excluded."""
    asked, cats = request({"class": "cat", "count": 2}), found(cat=[LEFT] * number)
    answer = judge(asked, cats, {}, 0.1)
    assert (answer.partial, answer.strict, is_correct(asked, cats, {}, 0.1)) == (partial, strict, correct)


def test_geneval_excludes_one_more() -> None:
    """Its counting prompts exclude n + 1, of which the number wanted speaks already: no criterion of its own."""
    asked = request({"class": "cat", "count": 2}, exclude=({"class": "cat", "count": 3},), tag="counting")
    cats = found(cat=[LEFT] * 3)
    assert judge(asked, cats, {}, 0.1).excluded == ()
    assert not is_correct(asked, cats, {}, 0.1)
    assert is_correct(asked, found(cat=[LEFT] * 2), {}, 0.1)


def test_another_class_excluded() -> None:
    asked = request({"class": "cat", "count": 1}, exclude=({"class": "dog", "count": 2},))
    for dogs, criterion in ((0, 1.0), (1, 1.0), (2, 0.0)):
        there = found(cat=[LEFT], dog=[RIGHT] * dogs)
        answer = judge(asked, there, {}, 0.1)
        assert answer.excluded == (criterion,)
        assert answer.partial == (1.0 + criterion) / 2
        assert answer.strict == is_correct(asked, there, {}, 0.1) == bool(criterion)


@pytest.mark.parametrize(
    ("colors", "partial", "strict"),
    [(("red", "red"), 1.0, True), (("red", "blue"), 0.75, False), (("blue",) * 2, 0.5, False)],
)
def test_colors(colors: tuple[str, str], partial: float, strict: bool) -> None:
    asked, cars = request({"class": "car", "count": 2, "color": "red"}), found(car=[LEFT, RIGHT])
    assert needs_colors(asked, cars) == {0: cars["car"]}
    answer = judge(asked, cars, {0: colors}, 0.1)
    assert (answer.partial, answer.strict, is_correct(asked, cars, {0: colors}, 0.1)) == (partial, strict, strict)


def test_of_the_wrong_number_no_color_counts() -> None:
    """This is flow_grpo's rule. The benchmark looks at the two most certain objects, so their colors are asked for."""
    asked, cars = request({"class": "car", "count": 2, "color": "red"}), found(car=[LEFT, RIGHT, LEFT])
    assert needs_colors(asked, cars) == {0: cars["car"][:2]}
    assert judge(asked, cars, {0: ("red", "red")}, 0.1).partial == (0.5 + 0.0) / 2
    assert is_correct(asked, cars, {0: ("red", "red")}, 0.1)
    assert needs_colors(asked, found(car=[LEFT])) == {}
    assert judge(asked, found(car=[LEFT]), {}, 0.1).partial == (0.5 + 0.0) / 2


def test_positions() -> None:
    asked = request({"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["left of", 0]})
    assert judge(asked, found(dog=[RIGHT], cat=[LEFT]), {}, 0.1).partial == 1.0
    assert is_correct(asked, found(dog=[RIGHT], cat=[LEFT]), {}, 0.1)
    wrong = judge(asked, found(dog=[LEFT], cat=[RIGHT]), {}, 0.1)
    assert (wrong.partial, wrong.strict) == (pytest.approx(2 / 3), False)
    assert not is_correct(asked, found(dog=[LEFT], cat=[RIGHT]), {}, 0.1)
    lost = judge(asked, found(cat=[LEFT]), {}, 0.1)  # nothing to be left of
    assert (lost.counts, lost.positions) == ((0.0, 1.0), (0.0,))
    two = request({"class": "dog", "count": 2}, {"class": "cat", "count": 1, "position": ["left of", 0]})
    assert judge(two, found(dog=[RIGHT, LEFT], cat=[(30.0, 40.0, 40.0, 60.0)]), {}, 0.1).positions == (0.0,)


def test_a_position_needs_its_color() -> None:
    asked = request(
        {"class": "dog", "count": 1, "color": "black"},
        {"class": "cat", "count": 1, "color": "white", "position": ["left of", 0]},
    )
    there = found(dog=[RIGHT], cat=[LEFT])
    assert judge(asked, there, {0: ["black"], 1: ["white"]}, 0.1).partial == 1.0
    assert judge(asked, there, {0: ["black"], 1: ["black"]}, 0.1).partial == pytest.approx(3 / 5)
    assert judge(asked, there, {0: ["brown"], 1: ["white"]}, 0.1).partial == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (RIGHT, {"left of"}),
        ((80.0, 120.0, 100.0, 140.0), {"left of", "above"}),
        ((2.0, 120.0, 22.0, 140.0), {"above"}),
        (LEFT, set()),
        ((3.0, 40.0, 23.0, 60.0), set()),  # offset 3, less than a tenth of 20 + 20
        ((5.0, 40.0, 25.0, 60.0), set()),  # (5 − 4) / 5 is 0.2
        ((9.0, 40.0, 29.0, 60.0), {"left of"}),  # (9 − 4) / 9 is more than a half
    ],
)
def test_relations(other: Box, expected: set[str]) -> None:
    assert relations(LEFT, other, 0.1) == expected
    opposite = {"left of": "right of", "above": "below"}
    assert relations(other, LEFT, 0.1) == {opposite[relation] for relation in expected}


def test_what_is_kept() -> None:
    boxes = [Detection(LEFT, score) for score in (0.3, 0.95, 0.31, 0.5)]
    assert [one.score for one in kept(boxes, 0.3, 16, 1.0)] == [0.95, 0.5, 0.31]
    assert [one.score for one in kept(boxes, 0.3, 2, 1.0)] == [0.95, 0.5]
    assert [one.score for one in kept([*boxes, Detection(RIGHT, 0.4)], 0.3, 16, 0.7)] == [0.95, 0.4]
    assert overlap((0, 0, 9, 9), (0, 0, 9, 4)) == 0.5  # 10 × 10 and 10 × 5 pixels, inclusive
    assert overlap(LEFT, RIGHT) == 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 16)), min_size=1, max_size=4))
def test_bounds_and_agreement(rows: list[tuple[int, int]]) -> None:
    """At most 1, which is strict; at least 2 − 16; what is strict is correct."""
    asked = request(*({"class": f"c{place}", "count": wanted} for place, (wanted, _) in enumerate(rows)))
    there = found(**{f"c{place}": [LEFT] * number for place, (_, number) in enumerate(rows)})
    answer = judge(asked, there, {}, 0.1)
    assert 2 - 16 <= answer.partial <= 1.0
    assert answer.strict == (answer.partial == 1.0)
    assert not answer.strict or is_correct(asked, there, {}, 0.1)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("cats", r"metadata\.geneval: Invalid JSON"),
        ("{}", "nothing is asked"),
        ('{"include": [{"class": "cat"}]}', r"metadata\.geneval\.include\.0\.count: Field required"),
        ('{"include": [{"class": "cat", "count": 0}]}', r"include\.0\.count"),
        ('{"include": [{"class": "cat", "count": 1, "color": "mauve"}]}', r"include\.0\.color"),
        ('{"include": [{"class": "cat", "count": 1, "colour": "red"}]}', r"include\.0\.colour"),
        ('{"include": [{"class": "cat", "count": 1, "position": ["above", 0]}]}', "name an earlier one"),
        ('{"include": [{"class": "cat", "count": 1, "position": ["near", 0]}]}', r"include\.0\.position\.0"),
    ],
)
def test_requests_that_cannot_be_read(text: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        read_request({"geneval": text})


def test_a_request_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"metadata\.geneval is missing"):
        read_request({"other": "1"})
