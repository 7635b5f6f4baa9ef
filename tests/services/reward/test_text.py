from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.text import MAX_TARGET_LENGTH, normalize, target_of, text_distance

short = st.text(alphabet="abcß9 ", max_size=7)


def oracle(first: str, second: str) -> int:
    """The recursive definition of the Levenshtein distance."""

    @cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        same = first[i - 1] == second[j - 1]
        return min(distance(i - 1, j) + 1, distance(i, j - 1) + 1, distance(i - 1, j - 1) + (not same))

    return distance(len(first), len(second))


@given(short, short.filter(bool))
def test_distance_is_zero_when_contained_else_capped(text: str, target: str) -> None:
    contained = any(text[start : start + len(target)] == target for start in range(len(text) + 1))
    assert text_distance(text, target) == (0 if contained else min(oracle(text, target), len(target)))


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('A sign that says "K7QX"', "k7qx"),
        ('"first" and "second"', "first"),
        ('"  Hello   World " on a wall', "helloworld"),
        ('a door with "Straße 北京" on it', "straße北京"),
        ('"Cafe\u0301"', "caf\u00e9"),
        ('a "line\nbreak"', "linebreak"),
    ],
)
def test_target_is_the_first_quoted_text(prompt: str, target: str) -> None:
    assert target_of(prompt) == target


def test_alphanumeric_keeps_letters_and_digits_of_any_script() -> None:
    assert target_of('"K-7 Q.X! 北"', alphanumeric=True) == "k7qx北"
    assert normalize("K-7 Q.X!", alphanumeric=False) == "k-7q.x!"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("A sign that says K7QX", "double quotes"),
        ('only one " of them', "double quotes"),
        ('an empty "" one', "visible characters"),
        ('blank " \t " inside', "visible characters"),
        (f'"{"x" * (MAX_TARGET_LENGTH + 1)}"', str(MAX_TARGET_LENGTH)),
    ],
)
def test_prompts_without_a_usable_target_are_refused(prompt: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        target_of(prompt)


def test_a_target_of_punctuation_is_refused_when_only_letters_count() -> None:
    assert target_of('"!?"') == "!?"
    with pytest.raises(ValueError, match="letters or digits"):
        target_of('"!?"', alphanumeric=True)
