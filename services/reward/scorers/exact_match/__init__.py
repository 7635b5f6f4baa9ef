"""`exact_match`: the answer is the reference, up to case, white space, punctuation at its ends and Unicode's forms."""

import unicodedata
from collections.abc import Mapping
from typing import Any

from services.reward.answers import AnswerScorer


class ExactMatch(AnswerScorer):
    """Compares the whole answer, or what follows `params.after`."""

    name = "exact_match"

    def find(self, text: str) -> str | None:
        return normalize(text) or None

    def agrees(self, found: str, reference: str) -> bool:
        return found == (normalize(reference) or reference)


def normalize(text: str) -> str:
    """NFKC, case folded, single spaces, no punctuation at the ends except signs of numbers, brackets and units."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return folded.strip(" .,;:!?\"'`*_")


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> ExactMatch:
    return ExactMatch()
