"""From an answer to a number: the expected value over the scale's answers by the probabilities of the answer's tokens.

    value = Σ P(a) · v(a) / Σ P(a)    over the answers a of the scale

With the answers "yes" = 1 and "no" = 0 that is P(yes) / (P(yes) + P(no)), as VQAScore (Lin and others, 2024); on 1 to 5
it is G-Eval's weighting (Liu and others, 2023). Tokens count without white space, marks and capitals around them. Where
an answer begins another ("1" and "10"), the model's next tokens distinguish them; such a beginning that
the model did not take counts for neither. Without log-probabilities the value is that of the answer in the text.

A text is read only where it gives one answer, be it twice. It gives none where it names several values in one breath
("yes or no"), denies one ("not yes"), refuses and concludes with none, or was cut off before its answer was complete.
The question's choice may precede the answer ("Yes or no? Yes."), and an explanation may follow it ("Yes - no flaws").
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from services.reward.judge.answers import Answer, Token

YES_NO = {"yes": 1.0, "no": 0.0}
MARKS = "*_\"'`.,:;()[]<>#"
MAX_ANSWERS = 101

Take = Literal["first", "last"]

_BREATH = re.compile(
    r"[\s\"'*_`,]*+(?:\b(?:or|and|nor|to|versus|vs\.?|but|through)\b|\||(?<!\s)[-–](?!\s))[\s\"'*_`]*+"
    r"(?:an? |also )?[\"'*_`]*+|(?<!\d)[\s*_`\"']*+/[\s*_`\"']*+|(?<=\d)\s*+[-–]\s*+",
    re.IGNORECASE,
)
"""Between answers that are named together."""
_TURN, _END = re.compile(r"[\s.,;:!?…*_–—-]++"), re.compile(r"[*_]*+\s*+(?:[.,;:!?…–—-]|$)")
"""Between answers that follow each other, and after the second."""
_CHOICE = re.compile(r"[\s\"'*_`,]*(?:or|to|and|through|versus|vs\.?|[/|–-]|(?<=,))[\s\"'*_`]*")
_ASKED = re.compile(r"[\"'*_`)\]]*+(?:[?:.…\n]|[ \t]*+[=→–—-])")
"""Between the answers of the question's choice, and after it."""
_OPENS = re.compile(r"(?:^|[.!?:;\n–—-])[\s\"'*_`]*$")
"""Before an answer that begins its clause."""
_DENIED = re.compile(
    r"(?:\b(?:not|never|neither|nor|than|over|instead of)|n't)\s+(?:[\w']+\s+){0,2}[\"'*_`]*$|\bout of\s*$",
    re.IGNORECASE,
)
"""Before an answer that is not given."""
_CONCLUDES = re.compile(r",\s*+(?:(?:so|thus|hence|therefore)\b[^,]*+|[\"'*_`]*+)$", re.IGNORECASE)
"""Before an answer that is given although its sentence began as a refusal ("Hard to judge, so 6.")."""
_GOES_ON = re.compile(r"\s++(?!out of\b)\w")
"""After a word that is not an answer there ("Hard to judge, no text is visible")."""
_REFUSED = re.compile(
    r"\b(?:can(?:not|'t| not)|could(?:n't| not)|wo(?:n't|uld not)|will not|rather not|refuse to|decline to|unable to|"
    r"not able to|(?:impossible|hard|difficult|not possible|no way) to)\s+(?:\w+\s+){0,2}?(?:answer|say|tell|determine|"
    r"assess|judge|evaluate|decide|rate|score|provide|give|comply|help|assist|confirm|verify|comment|choose|pick)\b|"
    r"\b(?:sorry|apologi[sz]e|as an? (?:ai|language|assistant)|(?:do not|don't) know|not sure|unsure|uncertain|"
    r"no (?:idea|comment|opinion|answer|clear answer)|n/a|inconclusive)\b",
    re.IGNORECASE,
)
"""Text of a refusal."""


@dataclass(frozen=True)
class Reading:
    """Value that was read from an answer. `mass`: probability of all answers of the scale together; `entropy` in nats,
    of their renormalized probabilities. Both None where the value was read from the text."""

    value: float
    mass: float | None = None
    entropy: float | None = None


@dataclass(frozen=True)
class Scale:
    """The answers that count, in lower case, and their values; at least two that differ."""

    values: Mapping[str, float]

    @classmethod
    def parse(cls, given: str | Mapping[str, float]) -> Scale:
        """Parses "yes/no", whole numbers as in "1-5", or a table from answer to value. Raises ValueError."""
        if given == "yes/no":
            return cls(YES_NO)
        if isinstance(given, str):
            return cls(_numbers(given))
        values = {str(answer).strip().lower(): float(value) for answer, value in given.items()}
        if "" in values or len(values) < len(given) or not 2 <= len(values) <= MAX_ANSWERS:
            raise ValueError(f"a scale needs 2 to {MAX_ANSWERS} answers that differ in more than capitals")
        if not all(map(math.isfinite, values.values())) or len(set(values.values())) < 2:
            raise ValueError("a scale needs finite values of which two differ")
        return cls(values)

    @property
    def range(self) -> tuple[float, float]:
        """Least and greatest value."""
        return min(self.values.values()), max(self.values.values())

    @cached_property
    def is_numeric(self) -> bool:
        """Its answers are numbers that mean themselves, so that "4.5" can be read, too."""
        return all(answer.isdigit() and float(answer) == value for answer, value in self.values.items())

    def __str__(self) -> str:
        answers = list(self.values)
        return f"{answers[0]}-{answers[-1]}" if self.is_numeric else "/".join(answers)

    def read(self, answer: Answer, take: Take = "first", min_mass: float = 0.05) -> Reading:
        """The value of an answer: of the first or the last place in it that names one of the scale's.

        min_mass: a text that names none still counts where the scale's answers have this much probability at its
        beginning ("Well, …"). ValueError says why an answer cannot be read.
        """
        text = ("".join(token.text for token in answer.tokens) or answer.text).replace("’", "'")
        named, given = self._mentions(text)
        match = self._choose(text, given, take) if given else None
        if (named and not match) or _refuses(text, match, take):
            raise ValueError(f"the answer {answer.shown} refuses, or names no one answer of the scale {self}")
        if answer.truncated and (take == "last" or (match and self._is_cut(text, match))):
            raise ValueError(f"the answer {answer.shown} ends before it is complete: raise max_tokens of the rubric")
        if match is None:
            first = next((place for place, token in enumerate(answer.tokens) if _clean(token.text)), None)
            reading = self._by_tokens(answer.tokens, first)
            if reading is None or reading.mass is None or reading.mass < min_mass:
                raise ValueError(f"the answer {answer.shown} is not on the scale {self}")
            return reading
        name = match[0].lower()
        if name in self.values:
            reading = self._by_tokens(answer.tokens, _token_at(answer.tokens, match.start()))
            return reading or Reading(self.values[name])
        low, high = self.range
        if "." not in name or not low <= float(name) <= high:
            raise ValueError(f"the answer {answer.shown} is not on the scale {self}")
        return Reading(float(name))

    def _mentions(self, text: str) -> tuple[list[re.Match[str]], list[re.Match[str]]]:
        """Returns the answers in the text (on a numeric scale all numbers) and those of them that it gives: not denied,
        and not in one breath or list with an answer of another value."""
        found = list(re.finditer(rf"(?<!\w)(?:{self._pattern})(?!\w)", text, re.IGNORECASE))
        slashes = [False, *(text[a.end() : b.start()].strip() == "/" for a, b in pairwise(found)), False]
        in_row = [slash and any(sides) for slash, *sides in zip(slashes[1:-1], slashes, slashes[2:], strict=False)]
        in_breath = [bool(_BREATH.fullmatch(text, a.end(), b.start())) for a, b in pairwise(found)]
        together = [any(pair) for pair in zip(in_breath, in_row, strict=False)] + [False]
        breaths = [found[:1]]
        for (a, b), is_together, goes_on in zip(pairwise(found), together, together[1:], strict=False):
            is_listed = goes_on and text[a.end() : b.start()].strip() == ","
            is_whole = _END.match(text, b.end()) or b[0].lower() == "yes"  # "no" and "3" may count objects
            in_turn = _TURN.fullmatch(text, a.end(), b.start()) and (is_listed or is_whole)
            if not (is_together or in_turn) or self._is_question(breaths[-1], text):
                breaths.append([])
            breaths[-1].append(b)
        parts = (".", "/", "-") if self.is_numeric else ()  # of a longer number, a fraction or a range
        named = [one for one in found if not text.endswith(parts, 0, one.start())]
        agreed = {one for breath in breaths if self._agree(breath) for one in breath}
        return named, [one for one in named if one in agreed and not _ends_before(one, _DENIED)]

    def _is_question(self, breath: Sequence[re.Match[str]], text: str) -> bool:
        """True if these mentions repeat the question's choice, as "yes or no", "1 to 5" or each answer once."""
        if not 2 <= len(breath) <= len(self.values) or not _ASKED.match(text, breath[-1].end()):
            return False
        names, answers = [one[0].lower() for one in breath], list(self.values)
        joins = [text[a.end() : b.start()].strip().lower() for a, b in pairwise(breath)]
        is_choice = joins != [","] and (self.is_numeric or "and" not in joins) and all(map(_CHOICE.fullmatch, joins))
        return is_choice and (sorted(names) == sorted(answers) or (names == [answers[0], answers[-1]]))

    def _choose(self, text: str, given: Sequence[re.Match[str]], take: Take) -> re.Match[str] | None:
        """Returns the answer that the text comes to. There is none where its last clause names several, or where "no
        flaws" contradicts an answer that stands alone."""
        start = max(text.rfind(mark, 0, given[-1].start()) for mark in ".!?:;\n") if take == "last" else -1
        chosen = [one for one in given if one.start() > start] if take == "last" else given[:1]
        goes_on = _GOES_ON.match(text, chosen[0].end()) and (take == "first" or _ends_before(chosen[0], _OPENS))
        alone = [one for one in given if goes_on and _END.match(text, one.end()) and _ends_before(one, _OPENS)]
        return chosen[-1] if self._agree([*chosen, *alone]) else None

    def _agree(self, mentions: Sequence[re.Match[str]]) -> bool:
        """True if all have the same value."""
        return len({float(one[0]) if self.is_numeric else self.values.get(one[0].lower()) for one in mentions}) == 1

    def _is_cut(self, text: str, match: re.Match[str]) -> bool:
        """True if what follows the end of the text might have continued the answer itself."""
        is_alone = not _clean(text[: match.start()])
        return not text[match.end() :].strip() and (not is_alone or self._begins_another(match[0].lower()))

    @cached_property
    def _pattern(self) -> str:
        longest_first = sorted(self.values, key=len, reverse=True)
        return r"\d++(?:\.\d++)?+" if self.is_numeric else "|".join(map(re.escape, longest_first))

    def _by_tokens(self, tokens: Sequence[Token], start: int | None) -> Reading | None:
        """None where the tokens say nothing of the scale."""
        if start is None:
            return None
        masses = self.masses(tokens[start:])
        total = math.fsum(masses.values())
        if total <= 0.0:
            return None
        shares = {name: mass / total for name, mass in masses.items() if mass > 0.0}
        value = math.fsum(share * self.values[name] for name, share in shares.items())
        entropy = max(0.0, -math.fsum(share * math.log(share) for share in shares.values()))
        low, high = self.range
        return Reading(min(max(value, low), high), min(total, 1.0), entropy)

    def masses(self, tokens: Sequence[Token]) -> dict[str, float]:
        """Probability of each answer of the scale that the first of `tokens` begins; those of none are left out."""
        masses: dict[str, float] = defaultdict(float)
        begun, reached = "", 1.0
        for token in tokens:
            for text, log_prob in _others(token):
                joined = _joined(begun, text)
                if joined in self.values and (joined == begun or not self._begins_another(joined)):
                    masses[joined] += reached * math.exp(log_prob)
            joined = _joined(begun, token.text)
            reached *= math.exp(min(0.0, token.log_prob))
            if joined == begun or not self._begins_another(joined):
                if joined in self.values:
                    masses[joined] += reached
                return dict(masses)
            begun = joined
        if begun in self.values:
            masses[begun] += reached
        return dict(masses)

    def _begins_another(self, text: str) -> bool:
        return any(answer.startswith(text) and answer != text for answer in self.values)


def _numbers(given: str) -> dict[str, float]:
    match = re.fullmatch(r"(\d{1,3})-(\d{1,3})", given)
    if not match:
        raise ValueError(f'scale = {given!r}: say "yes/no", whole numbers as "1-5", or a table from answer to value')
    low, high = int(match[1]), int(match[2])
    if not 0 < high - low < MAX_ANSWERS:
        raise ValueError(f"scale = {given!r}: it must rise, by at most {MAX_ANSWERS - 1}")
    return {str(number): float(number) for number in range(low, high + 1)}


def _others(token: Token) -> list[tuple[str, float]]:
    """Alternatives to the chosen token."""
    return [(text, min(0.0, log_prob)) for text, log_prob in token.top if text != token.text]


def _clean(text: str) -> str:
    return text.strip().strip(MARKS).strip().lower()


def _joined(begun: str, text: str) -> str:
    """An answer so far and one more token, which ends it unless it continues with a letter or digit."""
    if not begun:
        return _clean(text)
    return begun + _clean(text) if text[:1].isalnum() else begun


def _ends_before(answer: re.Match[str], pattern: re.Pattern[str], start: int = 0) -> re.Match[str] | None:
    """Searches the 60 characters before the answer only: a text of many answers is read in linear time."""
    return pattern.search(answer.string, max(start, answer.start() - 60), answer.start())


def _refuses(text: str, answer: re.Match[str] | None, take: Take) -> bool:
    """True if the text refuses before its answer is given, or, without one, anywhere. An answer that begins the text is
    given, whatever follows; one that concludes its sentence ("Hard to judge, so 6."), whatever precedes it there."""
    if answer is None:
        return _REFUSED.search(text) is not None
    sentence = max(text.rfind(mark, 0, answer.start()) for mark in ".!?\n") + 1
    start = sentence if take == "last" else 0
    end = min((at for mark in ".!?\n" if (at := text.find(mark, answer.end())) >= 0), default=len(text))
    if not _clean(text[start : answer.start()]):
        return _REFUSED.match(text, answer.start()) is not None
    concludes = None if _GOES_ON.match(text, answer.end()) else _ends_before(answer, _CONCLUDES, sentence)
    parts = [(start, sentence), (concludes.start(), end)] if concludes else [(start, end)]
    return any(_REFUSED.search(text, *part) for part in parts)


def _token_at(tokens: Sequence[Token], place: int) -> int | None:
    """Which token has the character at `place` of all tokens' text."""
    end = 0
    for number, token in enumerate(tokens):
        end += len(token.text)
        if place < end:
            return number
    return None
