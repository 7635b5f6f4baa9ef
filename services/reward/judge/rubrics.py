"""Rubrics: files that say what a judge is asked and how its answer becomes a score.

A question is text with slots in braces: {prompt}; {metadata.NAME} of the prompt's line in the data set; {image}, the
sample ({first} and {second} in pairs, {images} in rankings), of which a video is several frames; {answer}, a sample
that is a text ({first_answer} and {second_answer}, {answers}); {source}, the picture that was edited; {count} of a
ranking's samples. {{ and }} are braces.
"""

from __future__ import annotations

import hashlib
import string
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError, model_validator

from flowfleet.job.setting_files import read_table
from flowfleet.part import Part, in_words
from services.reward.judge.scale import Scale, Take

FOLDER: Final = Path(__file__).parent / "rubrics"
Mode = Literal["pointwise", "pairwise", "listwise"]
MEDIA_SLOTS: Final = {"pointwise": ("image",), "pairwise": ("first", "second"), "listwise": ("images",)}
ANSWER_SLOTS: Final = {
    "pointwise": ("answer",),
    "pairwise": ("first_answer", "second_answer"),
    "listwise": ("answers",),
}
"""Slots that a rubric names instead of `MEDIA_SLOTS` to judge texts."""
TEXT_SLOTS: Final = ("prompt", "count")
SOURCE: Final = "source"

Piece = tuple[str, str]
"""("text", literal) or ("slot", name)."""


class Rubric(Part):
    """Question about a sample, a pair of samples or a group, and how its answer is read."""

    question: Annotated[str, Field(min_length=1)]
    """The user's message, with slots in braces."""
    system: str = ""
    """System message."""
    mode: Mode = "pointwise"
    """"pointwise": each sample alone. "pairwise": the better of two of a group. "listwise": the order of a group."""
    scale: str | dict[str, float] = "yes/no"
    """"yes/no" (1 and 0), whole numbers such as "1-5", or a table from answer to value; in pairs how far the first
    is better, as {A = 1, B = 0}. Unused in rankings."""
    take: Take = "first"
    """"first" or "last" answer of the scale in the text; "last" for a judge that reasons first."""
    max_tokens: Annotated[int, Field(ge=1, le=16_384)] = 8
    """Maximum tokens of an answer. A ranking needs three per picture, reasoning hundreds."""
    min_mass: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """Probability of the scale's answers at the beginning that makes any other text count."""
    num_frames: Annotated[int, Field(ge=1, le=64)] = 4
    """Frames per video, evenly spaced."""
    aggregate: Literal["bradley_terry", "win_rate"] = "bradley_terry"
    """Score from pairs: log-strength, mean 0, or share of comparisons won."""
    max_pairs: Annotated[int, Field(ge=1)] = 64
    """Maximum pairs per group, drawn by the samples' contents. Each is asked in both orders."""
    num_rankings: Annotated[int, Field(ge=1, le=64)] = 3
    """Rankings per group, each in another order."""
    list_size: Annotated[int, Field(ge=3, le=64)] = 8
    """Maximum pictures per ranking; larger groups are split."""

    @model_validator(mode="after")
    def _fits(self) -> Rubric:
        names = [name for kind, name in self.pieces if kind == "slot"]
        for name in names:
            if name not in (*self.slots, SOURCE, *TEXT_SLOTS) and not name.startswith("metadata."):
                known = [*MEDIA_SLOTS[self.mode], *ANSWER_SLOTS[self.mode], SOURCE, *TEXT_SLOTS, "metadata.NAME"]
                raise ValueError(f"question: no slot {{{name}}} in a {self.mode} rubric; there are {', '.join(known)}")
        for name in self.slots:
            if names.count(name) != 1:
                raise ValueError(f"question: a {self.mode} rubric must name {{{name}}} once")
        scale = self.answers
        if self.mode == "pairwise" and scale.range != (0.0, 1.0):
            raise ValueError("scale: in pairs its values must go from 0 to 1, as in {A = 1.0, B = 0.0}")
        return self

    @property
    def judges_text(self) -> bool:
        """True if the samples are texts."""
        return any(name in ANSWER_SLOTS[self.mode] for kind, name in self.pieces if kind == "slot")

    @property
    def slots(self) -> tuple[str, ...]:
        """Slots of the samples."""
        return (ANSWER_SLOTS if self.judges_text else MEDIA_SLOTS)[self.mode]

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The question, taken apart. ValueError for braces that do not match."""
        try:
            parsed = list(string.Formatter().parse(self.question))
        except ValueError as error:
            raise ValueError(f"question: {error}; write {{{{ and }}}} for braces") from error
        found: list[Piece] = []
        for literal, name, spec, conversion in parsed:
            if literal:
                found.append(("text", literal))
            if name is not None:
                if spec or conversion or not name:
                    raise ValueError(f"question: {{{name}}} is no slot; write {{{{ and }}}} for braces")
                found.append(("slot", name))
        return tuple(found)

    @cached_property
    def answers(self) -> Scale:
        return Scale.parse(self.scale)

    @property
    def score_range(self) -> tuple[float, float]:
        """Least and greatest score."""
        if self.mode == "pointwise":
            return self.answers.range
        if self.mode == "pairwise" and self.aggregate == "bradley_terry":
            return float("-inf"), float("inf")
        return 0.0, 1.0

    @property
    def digest(self) -> str:
        """Changes with anything that could change a score."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


def shipped() -> list[str]:
    """Names of the rubrics that come with the service."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_rubric(name: str) -> Rubric:
    """A shipped rubric by its name, or a TOML or YAML file. ValueError names the file, the key and what to change."""
    path = FOLDER / f"{name}.toml" if name in shipped() else Path(name)
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ValueError(f"settings.rubric = {name!r}: take one of {', '.join(shipped())}, or a .toml or .yaml file")
    try:
        return Rubric.model_validate(read_table(path, "a rubric"))
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, item['loc']))}: {in_words(item)}" for item in error.errors(include_url=False))
        raise ValueError(f"settings.rubric: {path}: {'; '.join(problems)}") from None
    except ValueError as error:
        raise ValueError(f"settings.rubric: {error}") from error
