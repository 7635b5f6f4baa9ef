"""Scorers of written answers against cases whose score is known."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from services.reward import scorers
from services.reward.scorer import Outcome, Problem, Sample, Score, Scorer


def outcome(name: str, text: str, answer: str | None, **params: str) -> Outcome:
    scorer: Any = scorers.make(name, {}, 1)
    assert isinstance(scorer, Scorer)
    metadata = {} if answer is None else {"answer": answer}
    (found,) = scorer.score([Sample.of_text(text, "a question", metadata)], scorer.parse(params))
    return found


def score(name: str, text: str, answer: str, **params: str) -> float:
    found = outcome(name, text, answer, **params)
    assert isinstance(found, Score), found
    return found.value


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("Paris", "Paris", 1.0),
        (" paris.\n", "Paris", 1.0),
        ("ＰＡＲＩＳ", "paris", 1.0),
        ("Paris, France", "Paris", 0.0),
        ("-3", "3", 0.0),
        ("The  Hague", "the hague", 1.0),
        ("NYC", '["New York", "NYC"]', 1.0),
        ("", "Paris", 0.0),
        ("[1, 2", "[1, 2", 1.0),
    ],
)
def test_exact_match(text: str, answer: str, expected: float) -> None:
    assert score("exact_match", text, answer) == expected


def test_only_what_follows_the_last_mark_counts() -> None:
    assert score("exact_match", "first #### 4, no: #### 5", "5", after="####") == 1.0
    assert score("exact_match", "5", "5", after="####") == 0.0


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("The answer is B.", "B"),
        ("Answer: (C)", "C"),
        ("**Answer:** D", "D"),
        ("So \\boxed{A} it is, although option B is near", "A"),
        ("\\boxed{\\text{C}}", "C"),
        ("<answer>d</answer>", "D"),
        ("<answer> D </answer>", "D"),
        ("B", "B"),
        ("(B)", "B"),
        ("B. Paris", "B"),
        ("First option A, but the answer is B", "B"),
        ("A cat sits on the mat", ""),
        ("I don't know", ""),
        ("The answer is A cat", "A"),
        ("The answer is Apple", ""),
        ("", ""),
    ],
)
def test_the_chosen_letter(text: str, chosen: str) -> None:
    letters = [letter for letter in "ABCDEFGH" if score("multiple_choice", text, letter) == 1.0]
    assert letters == ([chosen] if chosen else [])


@pytest.mark.parametrize("answer", ["(b)", " B ", "B."])
def test_a_reference_may_be_written_as_in_data_sets(answer: str) -> None:
    assert score("multiple_choice", "B", answer) == 1.0


@pytest.mark.parametrize("name", ["exact_match", "multiple_choice", "math"])
def test_a_prompt_without_reference_gets_a_problem_that_names_the_field(name: str) -> None:
    if name == "math":
        pytest.importorskip("math_verify")
    found = outcome(name, "B", None, field="gold")
    assert isinstance(found, Problem)
    assert found.reason == "reference"
    assert "'gold'" in found.message


def test_a_reference_that_is_no_letter_gets_a_problem() -> None:
    found = outcome("multiple_choice", "B", "Paris")
    assert isinstance(found, Problem)
    assert "'Paris'" in found.message


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("so it is 0.5", "1/2", 1.0),
        ("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}", 1.0),
        ("we get 7, then \\boxed{8}", "8", 1.0),
        ("we get 8, then \\boxed{7}", "8", 0.0),
        ("$x^2 + 2x + 1$", "(x+1)^2", 1.0),
        ("1,234", "1234", 1.0),
        ("no idea", "8", 0.0),
        ("72 dollars", "72", 1.0),
        ("", "8", 0.0),
        ("$" * 20_000 + "\\boxed{8}", "8", 1.0),
    ],
)
def test_math(text: str, answer: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert score("math", text, answer) == expected


def test_math_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"pip install .*\[reward-math\]"):
        scorers.make("math", {}, 1)


def test_unknown_parameters_are_named() -> None:
    with pytest.raises(ValueError, match=r"params\.nosuch is unknown"):
        scorers.make("exact_match", {}, 1).parse({"nosuch": "gold"})
