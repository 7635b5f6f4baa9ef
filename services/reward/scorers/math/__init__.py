"""`math`: the final answer equals the reference as mathematics, by the library math-verify.

The library finds the last `\\boxed{…}`, formula or number of a text and compares it by SymPy, so that `1/2`, `0.5` and
`\\frac{2}{4}` are equal. A comparison beyond its time limit counts as wrong. The scorer has processes of its own,
because the library's timer needs their main thread, and because a formula may defeat the timer: then the pool ends
the process.
"""

import importlib
import logging
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from pydantic import Field

from flowfleet.extras import pip_install
from services.reward.answers import AnswerScorer
from services.reward.scorer import ProcessLimits, ScorerSettings

MAX_CHARACTERS = 8192
"""Only the last characters of a longer answer are read: its end has the result."""


class MathSettings(ScorerSettings):
    """Settings of `math`."""

    time_limit_s: int = Field(3, ge=1, le=60)
    """Limit on reading or comparing one answer."""


class MathAnswers(AnswerScorer):
    """Compares formulas and numbers. Raises ValueError without the library."""

    name = "math"
    isolated = True

    def __init__(self, settings: MathSettings) -> None:
        try:
            self._library: Any = importlib.import_module("math_verify")
        except ImportError as error:
            raise ValueError(f"scorer math needs math-verify ({error}): {pip_install('reward-math')}") from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self.version = f"1 (math-verify {version('math-verify')})"
        self._limit_s = settings.time_limit_s
        self.process_limits = ProcessLimits(base_s=20.0, sample_s=4.0 * settings.time_limit_s, setting="time_limit_s")
        self._gold = lru_cache(4096)(self._read_reference)

    def find(self, text: str) -> list[Any] | None:
        return self._parse(text[-MAX_CHARACTERS:]) or None

    def agrees(self, found: list[Any], reference: str) -> bool:
        gold = self._gold(reference)
        if not gold:
            raise ValueError(f"the reference answer {reference!r:.80} holds no formula or number that can be read")
        return bool(self._library.verify(gold, found, timeout_seconds=self._limit_s))

    def _read_reference(self, reference: str) -> list[Any]:
        is_marked = "$" in reference or "\\boxed" in reference
        return self._parse(reference if is_marked else f"\\boxed{{{reference}}}")

    def _parse(self, text: str) -> list[Any]:
        return list(self._library.parse(text, parsing_timeout=self._limit_s))


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> MathAnswers:
    return MathAnswers(MathSettings.read(settings))
