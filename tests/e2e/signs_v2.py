"""The OCR reward's second version, for the `python` scorer: the recognizer's own probability of the sign's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from PIL import Image

from services.reward.scorer import Sample, Score
from services.reward.scorers.ocr import OcrScorer


@cache
def scorer() -> OcrScorer:
    return OcrScorer(num_threads=1)


def soft(
    pictures: Sequence[Image.Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, str]], **params: str
) -> list[float]:
    """One score a picture; `params` as those of the OCR reward."""
    samples = [Sample.of_picture(picture, prompt) for picture, prompt in zip(pictures, prompts, strict=True)]
    outcomes = scorer().score(samples, scorer().parse({**params, "score": "soft"}))
    return [outcome.value if isinstance(outcome, Score) else float("nan") for outcome in outcomes]
