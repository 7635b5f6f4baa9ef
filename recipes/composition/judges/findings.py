"""What a judge finds in a picture, and how it answers a request: GenEval's rules, and the same for words and styles.

For the tag "text" the word counts 1 − edit distance / length, for "style" the style counts 1 where it is the one asked
for; both are one more criterion in the mean of "partial", and must be right for "strict" and "correct".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from rapidfuzz.distance import Levenshtein

from services.reward.scorers.networks.geneval_rules import (
    SCORES,
    Detection,
    is_correct,
    judge,
    needs_colors,
    read_request,
)

SIGN: Final = "sign"
POSITION_THRESHOLD: Final = 0.1
COMPONENTS: Final = (*SCORES, "count", "color", "position", "exclude", "word", "style", "extra")
"""What `answer` says besides the score; of the last seven only what the request asks, and always `extra`, the number
of things that are found and not asked for."""


@dataclass(frozen=True)
class Thing:
    """Something found: its class, box in pixels, certainty, and color by name, "" where nothing tells it."""

    name: str
    box: tuple[float, float, float, float]
    certainty: float
    color: str


@dataclass(frozen=True)
class Findings:
    """All that a judge sees in a picture. `word` is what the most certain sign says, "" without one."""

    things: Sequence[Thing]
    style: str
    word: str


def answer(findings: Findings, metadata: Mapping[str, str], score: str = "partial") -> dict[str, float]:
    """`score`, which is one of "partial", "strict" and "correct", and all `COMPONENTS` that the request asks for.

    metadata: as `captions.prompt_lines` writes it. ValueError for metadata without a request, and an unknown score.
    """
    if score not in SCORES:
        raise ValueError(f"no score is called {score!r}: take one of {', '.join(SCORES)}")
    request = read_request(metadata)
    by_name: dict[str, list[Thing]] = {}
    for thing in sorted(findings.things, key=lambda one: -one.certainty):
        by_name.setdefault(thing.name, []).append(thing)
    found = {name: [Detection(one.box, one.certainty) for one in ones] for name, ones in by_name.items()}
    colors = {
        index: [thing.color for thing in by_name[request.include[index].name][: len(objects)]]
        for index, objects in needs_colors(request, found).items()
    }
    answered = judge(request, found, colors, POSITION_THRESHOLD)
    ours = {}
    if word := metadata.get("word"):
        ours["word"] = max(0.0, 1.0 - Levenshtein.distance(findings.word, word) / len(word))
    if style := metadata.get("style"):
        ours["style"] = float(findings.style == style)
    criteria = [*answered.counts, *answered.colors, *answered.positions, *answered.excluded, *ours.values()]
    is_right = all(value == 1.0 for value in ours.values())
    values = {
        "partial": fmean(criteria),
        "strict": float(answered.strict and is_right),
        "correct": float(is_right and is_correct(request, found, colors, POSITION_THRESHOLD)),
    }
    asked = {
        name: fmean(numbers)
        for name, numbers in (
            ("count", answered.counts),
            ("color", answered.colors),
            ("position", answered.positions),
            ("exclude", answered.excluded),
        )
        if numbers
    }
    extra = float(sum(len(ones) for name, ones in found.items() if name not in request.names))
    return {"score": values[score], **values, **asked, **ours, "extra": extra}
