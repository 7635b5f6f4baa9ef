"""`multiple_choice`: the letter that an answer chooses is the reference's.

The last of these counts, in this order of preference: `\\boxed{B}`, `<answer>B</answer>`, "the answer is B" (or
"answer: B", "option B", "choice B"), and an answer that is a letter alone, as in "(B)" or "B. Paris". A letter in
running text is never taken for a choice.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from services.reward.answers import AnswerScorer

_LETTER: Final = r"\(?\s*(?:\\(?:text|mathrm|mathbf)\{)?\s*\(?([A-Z])\)?(?![\w'’])"
_MARKED: Final = (
    re.compile(r"\\boxed\{\s*" + _LETTER),
    re.compile(r"<answer>\s*" + _LETTER, re.IGNORECASE),
    re.compile(r"(?i:\b(?:answer|option|choice)\b(?:\s+is)?)\s*:?\s*[*_`\"']*" + _LETTER),
)
_ALONE: Final = re.compile(r"[\s*_`\"']*" + _LETTER + r"(?:[*_`\"']*[.):,][^\n]*|[\s*_`\"'.]*)")


class MultipleChoice(AnswerScorer):
    """Reads the chosen letter."""

    name = "multiple_choice"

    def find(self, text: str) -> str | None:
        for pattern in _MARKED:
            if found := pattern.findall(text):
                return str(found[-1]).upper()
        lines = text.strip().splitlines()
        if lines and (alone := _ALONE.fullmatch(lines[-1])):
            return alone[1].upper()
        return None

    def agrees(self, found: str, reference: str) -> bool:
        letter = reference.strip().strip("().").upper()
        if not re.fullmatch("[A-Z]", letter):
            raise ValueError(f"the reference answer {reference!r:.80} must be one letter from A to Z")
        return found == letter


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> MultipleChoice:
    return MultipleChoice()
