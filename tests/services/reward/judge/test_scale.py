"""Answers to numbers, against the formulas written out."""

from __future__ import annotations

import contextlib
import math
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.judge.answers import Answer, Token
from services.reward.judge.scale import Scale, Take

YES_NO = Scale.parse("yes/no")


def token(said: str, **top: float) -> Token:
    """A token that was said, with the probabilities of all in its place."""
    return Token(said, math.log(top[said]), tuple((text, math.log(p)) for text, p in top.items()))


def spaced(said: str, probabilities: dict[str, float]) -> Token:
    return token(said, **probabilities)


def answer(*tokens: Token) -> Answer:
    return Answer("".join(one.text for one in tokens), tokens)


@given(st.floats(0.01, 0.5), st.floats(0.01, 0.49))
@settings(deadline=None, max_examples=20)
def test_yes_and_no_are_vqascores_ratio(yes: float, no: float) -> None:
    said = "Yes" if yes >= no else "No"
    reading = YES_NO.read(answer(token(said, Yes=yes, No=no, Maybe=0.005)))
    assert reading.value == pytest.approx(yes / (yes + no))
    assert reading.mass == pytest.approx(yes + no)
    p = yes / (yes + no)
    assert reading.entropy == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)), abs=1e-9)


def test_spaces_capitals_and_marks_are_summed() -> None:
    places = {"Yes": 0.3, " yes": 0.2, "**YES": 0.1, "no": 0.2, " No": 0.1, "I": 0.1}
    reading = YES_NO.read(answer(spaced("Yes", places)))
    assert reading.value == pytest.approx(0.6 / 0.9)
    assert reading.mass == pytest.approx(0.9)


@given(st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5))
@settings(deadline=None, max_examples=20)
def test_a_range_gives_the_expected_value(weights: list[float]) -> None:
    share = {str(n): w / sum(weights) * 0.8 for n, w in enumerate(weights, 1)}
    said = max(share, key=lambda name: share[name])
    reading = Scale.parse("1-5").read(answer(spaced(said, share)))
    assert reading.value == pytest.approx(sum(int(n) * p for n, p in share.items()) / 0.8)
    assert reading.mass == pytest.approx(0.8)


def test_ten_is_two_tokens() -> None:
    first = spaced("1", {"1": 0.5, "9": 0.3, "8": 0.2})
    second = spaced("0", {"0": 0.6, "<|im_end|>": 0.3, "7": 0.1})
    reading = Scale.parse("1-10").read(answer(first, second))
    # 1·0: ten; 1 and its end: one; 17 is not on the scale
    expected = {10: 0.5 * 0.6, 1: 0.5 * 0.3, 9: 0.3, 8: 0.2}
    assert reading.mass == pytest.approx(sum(expected.values()))
    assert reading.value == pytest.approx(sum(n * p for n, p in expected.items()) / sum(expected.values()))


def test_a_beginning_that_was_not_taken_counts_for_neither() -> None:
    reading = Scale.parse("0-10").read(answer(spaced("9", {"9": 0.6, "1": 0.3, "8": 0.1})))
    assert reading.value == pytest.approx((9 * 0.6 + 8 * 0.1) / 0.7)
    assert reading.mass == pytest.approx(0.7)


def test_an_answer_of_several_tokens_in_words() -> None:
    scale = Scale.parse({"very good": 1.0, "very bad": 0.0})
    tokens = [token("very", very=0.9, so=0.1), spaced(" good", {" good": 0.75, " bad": 0.25})]
    with pytest.raises(ValueError, match="2 to 101"):
        Scale.parse({"A": 1.0, "a": 0.0})
    assert scale.read(Answer("very good")).value == 1.0
    assert scale.read(answer(*tokens)).value == 1.0  # read from the text: words with spaces are no single tokens


def test_text_before_the_answer_and_the_last_place() -> None:
    tokens = [
        token("Score", Score=1.0),
        token(":", **{":": 1.0}),
        token(" ", **{" ": 1.0}),
        spaced("4", {"4": 0.6, "2": 0.4}),
    ]
    scale = Scale.parse("1-5")
    assert scale.read(answer(*tokens)).value == pytest.approx(0.6 * 4 + 0.4 * 2)
    reasons = [spaced("2", {"2": 1.0}), token("; then: ", **{"; then: ": 1.0}), spaced("5", {"5": 0.5, "4": 0.5})]
    assert scale.read(answer(*reasons), "last").value == pytest.approx(4.5)
    assert scale.read(answer(*reasons), "first").value == 2.0


@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 4.0), ("Rating: 3/5", 3.0), ("**5**.", 5.0), ("4.5", 4.5), (" 2\n", 2.0), ("4.0\n\n4", 4.0)],
)
def test_numbers_in_text(text: str, value: float) -> None:
    reading = Scale.parse("1-5").read(Answer(text))
    assert (reading.value, reading.mass, reading.entropy) == (value, None, None)


@pytest.mark.parametrize("text", ["", "50", "0", "-3", "five", "9.5", "v4x"])
def test_what_is_not_on_the_scale_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not on the scale 1-5"):
        Scale.parse("1-5").read(Answer(text))


def test_a_number_beyond_the_scale_is_not_read_by_its_first_digit() -> None:
    with pytest.raises(ValueError, match="'50' is not on the scale"):
        Scale.parse("1-5").read(answer(spaced("5", {"5": 1.0}), spaced("0", {"0": 1.0})))


def test_an_answer_that_names_none_counts_by_its_mass() -> None:
    tokens = answer(token("Well", Well=0.5, Yes=0.3, No=0.1))
    assert YES_NO.read(tokens).value == pytest.approx(0.75)
    with pytest.raises(ValueError, match="not on the scale yes/no"):
        YES_NO.read(tokens, min_mass=0.5)


def test_a_log_probability_of_minus_infinity_is_zero() -> None:
    tokens = (Token("yes", 0.0, (("yes", 0.0), ("no", -math.inf))),)
    assert YES_NO.read(Answer("yes", tokens)).value == 1.0


@pytest.mark.parametrize(
    "scale", ["5-1", "1-1", "good", "1-1000", {"a": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": math.nan}]
)
def test_bad_scales(scale: str | dict[str, float]) -> None:
    with pytest.raises(ValueError, match="scale"):
        Scale.parse(scale)


NONE = None
CORPUS = {
    "yes/no": [
        # text, value by the first answer, by the last
        ("Yes", 1.0, 1.0),
        ("**No**.", 0.0, 0.0),
        ("The picture is sharp. Yes.", 1.0, 1.0),
        ("Answer (yes or no): yes", 1.0, 1.0),
        ("Yes or no? I'd say no.", 0.0, 0.0),
        ("No, I cannot see any text", 0.0, 0.0),
        ("Yes, there is no text", 1.0, NONE),
        ("I cannot answer yes or no.", NONE, NONE),
        ("Neither yes nor no.", NONE, NONE),
        ("I'm unable to say yes or no to this.", NONE, NONE),
        ("I am unable to tell; yes", NONE, NONE),
        ("I can\u2019t tell, but yes", NONE, NONE),
        ("Sorry, I can't help with that: no", NONE, NONE),
        ("As an AI, I would say yes", NONE, NONE),
        ("It's impossible to say. yes/no", NONE, NONE),
        ("Not sure, maybe yes", NONE, NONE),
        ("No idea.", NONE, NONE),
        ("It is not yes", NONE, NONE),
        ("Yes and no", NONE, NONE),
        ("Yes. No.", NONE, NONE),
        ("Yes, but also no.", NONE, NONE),
        ("yes/no", NONE, NONE),
        ("Yes. Yes.", 1.0, 1.0),
        ("Yes, yes.", 1.0, 1.0),
        ("Yes!\n\nYes", 1.0, 1.0),
        ("Answer: yes\nYes.", 1.0, 1.0),
        ("**No**\n\n**No**", 0.0, 0.0),
        ("no or no", 0.0, 0.0),
        ("Yes, yes, no.", NONE, NONE),
        ("Yes. Yes. No.", NONE, NONE),
        ("**Yes.** **No.**", NONE, NONE),
        ("Yes, no or little noise is visible", 1.0, NONE),
        ("Hard to judge, no.", 0.0, 0.0),
        ("I can't tell, no text is visible", NONE, NONE),
        ("I can't see it, so I won't say yes.", NONE, NONE),
        ("I cannot judge this, so no answer.", NONE, NONE),
        ("I cannot tell, yes or no.", NONE, NONE),
        # the question's choice before the answer
        ("Yes or no? Yes.", 1.0, 1.0),
        ("Yes or No?\nNo", 0.0, 0.0),
        ("yes/no: yes", 1.0, 1.0),
        ("**Yes** / **No**? **No**", 0.0, 0.0),
        ("[yes/no]: no", 0.0, 0.0),
        ("Is it sharp, yes or no? Yes, it is sharp.", 1.0, 1.0),
        ("Answer yes or no. Yes.", 1.0, 1.0),
        ("**Yes or no?** **Yes**", 1.0, 1.0),
        ("Yes or no? Yes or no? Yes.", 1.0, 1.0),
        ("yes/no - yes", 1.0, 1.0),
        ("Yes or no — no", 0.0, 0.0),
        ("Yes | No: No", 0.0, 0.0),
        ('"Yes" or "No"? "No".', 0.0, 0.0),
        ("Yes or no?", NONE, NONE),
        ("Yes or no? Yes or no.", NONE, NONE),
        ("Yes or no? Yes and no.", NONE, NONE),
        ("Yes or no? Yes. No.", NONE, NONE),
        ("Yes or no? Not yes.", NONE, NONE),
        ("Yes or no? I cannot tell.", NONE, NONE),
        ("Yes and no? Yes.", NONE, NONE),
        ("Yes or no, yes.", NONE, NONE),
        ("Yes, no. Yes.", NONE, NONE),
        ("Yes. No. Yes.", NONE, NONE),
        # an explanation after the answer
        ("Yes - no flaws", 1.0, NONE),
        ("Yes — no flaws", 1.0, NONE),
        ("Yes—no flaws.", 1.0, NONE),
        ("Yes – no flaws", 1.0, NONE),
        ("Yes -- no flaws are visible", 1.0, NONE),
        ("**Yes** - no flaws", 1.0, NONE),
        ("Yes: no flaws", 1.0, NONE),
        ("Yes. No flaws.", 1.0, NONE),
        ("No — no sign is legible.", 0.0, 0.0),
        ("No, not yes", 0.0, 0.0),
        ("No - not yes", 0.0, 0.0),
        ("Yes - not no", 1.0, 1.0),
        ("Is it sharp? Yes. Any text? No. So it is a yes overall.", 1.0, 1.0),
        ("No flaws are visible. Yes.", NONE, 1.0),
        ("Yes - no", NONE, NONE),
        ("Yes — No.", NONE, NONE),
        ("yes-no", NONE, NONE),
        ("No - yes it is sharp", NONE, NONE),
        ("No, yes it is sharp", NONE, NONE),
    ],
    "1-5": [
        ("4", 4.0, 4.0),
        ("Rating: 3/5", 3.0, 3.0),
        ("4 out of 5", 4.0, 4.0),
        ("On a scale of 1 to 5, I give 4", 4.0, 4.0),
        ("I give it a 4, not a 5", 4.0, 4.0),
        ("3 or 4", NONE, NONE),
        ("2, 3 or 4", NONE, NONE),
        ("3-4", NONE, NONE),
        ("between 2 and 4", NONE, NONE),
        ("not 5", NONE, NONE),
        ("5. 1.", NONE, NONE),
        ("I can't rate this from 1 to 5", NONE, NONE),
        ("I won't rate it, but 3", NONE, NONE),
        ("Score: 4\n\n4", 4.0, 4.0),
        ("4/5. 4.", 4.0, 4.0),
        ("Score: 4\n\n5", NONE, NONE),
        ("2, 3, 4, or 5", NONE, NONE),
        ("I cannot say it is perfect, so 3.", 3.0, 3.0),
        ("I can't call it perfect or rate it higher, so I give it **4**/5.", 4.0, 4.0),
        ("Hard to judge, 3.", 3.0, 3.0),
        ("Hard to judge, so 3 out of 5", 3.0, 3.0),
        ("I cannot rate a blank picture. Hard to judge, 3.", NONE, 3.0),
        ("1-5: 4", 4.0, 4.0),
        ("Rating (1-5): 4", 4.0, 4.0),
        ("1 to 5? 4.", 4.0, 4.0),
        ("On a scale between 1 and 5: 4.", 4.0, 4.0),
        ("1, 2, 3, 4 or 5? 4", 4.0, 4.0),
        ("1/2/3/4/5: 3", 3.0, 3.0),
        ("4 - good", 4.0, 4.0),
        ("4 — 3 objects are missing", 4.0, NONE),
        ("4. 3 objects are missing.", 4.0, NONE),
        ("5 objects were asked. Score: 4.", NONE, 4.0),
        ("1 to 5? 3 or 4.", NONE, NONE),
        ("1-5", NONE, NONE),
        ("3 or 4? 4.", NONE, NONE),
        ("4 - 5", NONE, NONE),
        ("4 – 5 points", NONE, NONE),
    ],
    "table": [
        ("Score: 4\n\n4", 0.75, 0.75),
        ("4 or 4", 0.75, 0.75),
        ("Score: 4\n\n3", NONE, NONE),
        ("2, 3 or 4", NONE, NONE),
        ("1 to 5? 4.", 0.75, 0.75),
        ("Score (1-5): 2 - blurry", 0.25, 0.25),
        ("4 — 5", NONE, NONE),
    ],
}
CASES = [(scale, *case) for scale, cases in CORPUS.items() for case in cases]
TABLE = {str(number): number / 4 - 0.25 for number in range(1, 6)}


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("take", ["first", "last"])
@pytest.mark.parametrize(("scale", "text", "first", "last"), CASES)
def test_a_text_is_read_only_where_it_gives_one_answer(
    scale: str, text: str, first: float | None, last: float | None, take: Take, with_tokens: bool
) -> None:
    """Tokens would give half of the probability of each place to an answer of the scale."""
    parsed = Scale.parse(TABLE if scale == "table" else scale)
    names = list(parsed.values)
    tokens = tuple(
        Token(part, math.log(0.6), ((part, math.log(0.6)), (names[0], math.log(0.2)), (names[1], math.log(0.2))))
        for part in re.findall(r"\W*\w+|\W+$", text)
    )
    said = Answer(text, tokens if with_tokens else ())
    expected = first if take == "first" else last
    if expected is None:
        with pytest.raises(ValueError, match="refuses, or names no one answer"):
            parsed.read(said, take)
    elif with_tokens:
        assert parsed.read(said, take).mass is not None
    else:
        assert parsed.read(said, take).value == expected


TEXTS = [
    "1, ",
    "yes, ",
    "1 ",
    "no or ",
    "1-",
    "yes / ",
    "I see no flaws, no noise and no text in this picture ",
    "not no ",
    "I cannot say, no, ",
    "hard to judge, so 4, ",
    'yes """"',
    "1a",
    "yes or no? ",
    "yes - ",
    "no flaws. ",
    "1/",
]
LONG = {text: text * (20_000 // len(text)) for text in TEXTS} | {
    "enumeration": ", ".join(map(str, range(4_000))),
    "spaces": f"yes, {' ' * 20_000}x cannot{' ' * 20_000}x not{' ' * 20_000}no",
    "choices": "0-100? " * 3_000,
    "numbers": f"{', '.join(map(str, range(101)))}? " * 60,
    "quotes": "yes or" + '"' * 20_000 + "x no",
}


@pytest.mark.parametrize("take", ["first", "last"])
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_texts_are_read_in_linear_time(text: str, take: Take) -> None:
    start = time.monotonic()
    for scale in (YES_NO, Scale.parse("0-100"), Scale.parse(TABLE)):
        with contextlib.suppress(ValueError):
            scale.read(Answer(text), take)
    assert time.monotonic() - start < 5.0  # of about 0.3 s; quadratic steps take minutes


@pytest.mark.parametrize(
    ("scale", "text", "take", "is_read"),
    [
        ("yes/no", "Yes", "first", True),  # of rubrics with one token
        ("yes/no", "Yes, because the sign", "first", True),
        ("yes/no", "The answer is no", "first", False),  # or "not clear"
        ("yes/no", "At first yes, but looking at", "last", False),
        ("1-5", "4", "first", True),
        ("1-10", "1", "first", False),
        ("1-5", "The rating is 4", "first", False),  # or 4.5
    ],
)
def test_an_answer_that_is_cut_off_is_not_read(scale: str, text: str, take: Take, is_read: bool) -> None:
    said = Answer(text, truncated=True)
    if is_read:
        Scale.parse(scale).read(said, take)
    else:
        with pytest.raises(ValueError, match="ends before it is complete: raise max_tokens"):
            Scale.parse(scale).read(said, take)
