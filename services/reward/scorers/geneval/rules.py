"""Scores how far the objects found in a picture match geneval's request: their numbers, colors and places.

Source: Ghosh et al., "GenEval" (arXiv 2310.11513), and the code published with it; the graded reward is that of
flow_grpo's reward server. For each object that is wanted, in order, with c the number wanted and n the number found:

- count: 1 − |c − n| / c, which is negative where more than twice as many are found;
- color, if asked: 1 − |c − k| / c with k of that color; 0 unless n = c;
- position, if asked: 1 where each of them lies so to each object of the group it refers to; 0 unless count and color
  are right, both of it and of that group.

An excluded object of which the numbers wanted do not speak counts as well: 1 where fewer are found, else 0.

- "partial": the mean of all these. flow_grpo's differs in two places: it adds a 1 to the mean where a position is
  wrong, and leaves out the position where the color is wrong.
- "strict": 1 where all are 1, else 0.
- "correct": the benchmark's own measure. Of each kind the c most certain objects alone count, so more may be found,
  unless they are excluded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

METADATA = "geneval"
"""Key of a sample's metadata that holds the request as JSON."""
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
SCORES = ("partial", "strict", "correct")

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels."""


@dataclass(frozen=True)
class Detection:
    """An object in a picture; `score` 0 … 1 is the detector's."""

    box: Box
    score: float


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Objects(_Strict):
    name: str = Field(alias="class", min_length=1)
    count: int = Field(ge=1)


class Excluded(_Objects):
    """Fewer than `count` objects of a class."""


class Wanted(_Objects):
    """`count` objects of a class, with a color and a place relative to those of an earlier entry."""

    color: Literal["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"] | None = (
        None
    )
    position: tuple[Literal["left of", "right of", "above", "below"], int] | None = None


class Request(_Strict):
    """A line of geneval's evaluation_metadata.jsonl."""

    tag: str = ""
    """"counting" takes a higher threshold of certainty; others are for people."""
    prompt: str = ""
    include: tuple[Wanted, ...] = ()
    exclude: tuple[Excluded, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.include and not self.exclude:
            raise ValueError("include and exclude are both empty: nothing is asked")
        for index, wanted in enumerate(self.include):
            if wanted.position is not None and not 0 <= wanted.position[1] < index:
                raise ValueError(f"include.{index}.position refers to entry {wanted.position[1]}: name an earlier one")
        return self

    @property
    def names(self) -> list[str]:
        """Names of all classes, each once."""
        entries: list[_Objects] = [*self.include, *self.exclude]
        return list(dict.fromkeys(entry.name for entry in entries))

    def unspoken(self) -> list[Excluded]:
        """Returns the exclusions that the wanted numbers do not already imply."""
        most = {wanted.name: wanted.count for wanted in self.include}
        return [entry for entry in self.exclude if most.get(entry.name, entry.count) >= entry.count]


def read_request(metadata: Mapping[str, str]) -> Request:
    """Reads the request in a sample's metadata. Raises ValueError, which says what to change."""
    if METADATA not in metadata:
        raise ValueError(
            f"metadata.{METADATA} is missing: it holds what the picture should show as JSON, such as "
            '{"include": [{"class": "cat", "count": 2}]}'
        )
    try:
        return Request.model_validate_json(metadata[METADATA])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"metadata.{METADATA}{f'.{place}' if place else ''}: {first['msg']}") from None


Found = Mapping[str, Sequence[Detection]]
"""Class to its objects, the most certain first."""
Colors = Mapping[int, Sequence[str]]
"""Index in `include` to the color of each of the `count` most certain objects of its class."""


@dataclass(frozen=True)
class Answer:
    """The criteria of a request, each at most 1."""

    counts: tuple[float, ...]
    colors: tuple[float, ...]
    positions: tuple[float, ...]
    excluded: tuple[float, ...]

    @property
    def of_wanted(self) -> tuple[float, ...]:
        return self.counts + self.colors + self.positions

    @property
    def partial(self) -> float:
        return fmean(self.of_wanted + self.excluded)

    @property
    def strict(self) -> bool:
        return all(criterion == 1.0 for criterion in self.of_wanted + self.excluded)


def needs_colors(request: Request, found: Found) -> dict[int, Sequence[Detection]]:
    """The objects whose color decides, by index in `include`."""
    return {
        index: found.get(wanted.name, ())[: wanted.count]
        for index, wanted in enumerate(request.include)
        if wanted.color is not None and len(found.get(wanted.name, ())) >= wanted.count
    }


def judge(
    request: Request, found: Found, colors: Colors, position_threshold: float, *, most_certain: bool = False
) -> Answer:
    """How far the objects found answer a request; or, of each class, as many of the most certain as are wanted."""
    counts, right_colors, positions = [], [], []
    groups: list[Sequence[Detection] | None] = []
    for index, wanted in enumerate(request.include):
        objects = found.get(wanted.name, ())[: wanted.count if most_certain else None]
        right = len(objects) == wanted.count
        counts.append(1.0 - abs(wanted.count - len(objects)) / wanted.count)
        if wanted.color is not None:
            alike = list(colors[index]).count(wanted.color) if right else 0
            right = right and alike == wanted.count
            right_colors.append(1.0 - abs(wanted.count - alike) / wanted.count)
        if wanted.position is not None:
            relation, target = wanted.position
            right = right and _all_lie(objects, relation, groups[target], position_threshold)
            positions.append(float(right))
        groups.append(objects if right else None)
    excluded = [float(len(found.get(entry.name, ())) < entry.count) for entry in request.unspoken()]
    return Answer(tuple(counts), tuple(right_colors), tuple(positions), tuple(excluded))


def is_correct(request: Request, found: Found, colors: Colors, position_threshold: float) -> bool:
    """The benchmark's own measure."""
    answer = judge(request, found, colors, position_threshold, most_certain=True)
    too_many = any(len(found.get(entry.name, ())) >= entry.count for entry in request.exclude)
    return not too_many and all(criterion == 1.0 for criterion in answer.of_wanted)


def relations(box: Box, other: Box, threshold: float) -> set[str]:
    """How a box lies to another: "left of", "right of", "above", "below", none or two of them.

    The offset of the centers, made shorter on each axis by `threshold` times both widths (heights), over the length of
    the whole offset, must be more than a half on an axis.
    """
    offset = [(box[axis] + box[axis + 2]) / 2 - (other[axis] + other[axis + 2]) / 2 for axis in (0, 1)]
    sizes = [abs(box[axis + 2] - box[axis]) + abs(other[axis + 2] - other[axis]) for axis in (0, 1)]
    shorter = [
        math.copysign(max(abs(way) - threshold * size, 0.0), way) for way, size in zip(offset, sizes, strict=True)
    ]
    if all(abs(way) < 1e-3 for way in shorter):
        return set()
    dx, dy = (way / math.hypot(*offset) for way in shorter)
    said = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {relation for relation, holds in said.items() if holds}


def kept(objects: Sequence[Detection], threshold: float, max_objects: int, max_overlap: float) -> list[Detection]:
    """The most certain first: those above the threshold, at most so many, without those that overlap a kept one by
    `max_overlap` (intersection over union) or more; 1: overlaps do not matter."""
    certain = sorted((one for one in objects if one.score > threshold), key=lambda one: -one.score)[:max_objects]
    chosen: list[Detection] = []
    for one in certain:
        if max_overlap == 1.0 or all(overlap(one.box, other.box) < max_overlap for other in chosen):
            chosen.append(one)
    return chosen


def overlap(box: Box, other: Box) -> float:
    """Intersection over union, with geneval's inclusive pixels: a box is right − left + 1 wide."""

    def area(left: float, top: float, right: float, bottom: float) -> float:
        return max(right - left + 1, 0.0) * max(bottom - top + 1, 0.0)

    shared = area(max(box[0], other[0]), max(box[1], other[1]), min(box[2], other[2]), min(box[3], other[3]))
    return shared / whole if (whole := area(*box) + area(*other) - shared) else 0.0


def _all_lie(
    objects: Sequence[Detection], relation: str, targets: Sequence[Detection] | None, threshold: float
) -> bool:
    return targets is not None and all(
        relation in relations(one.box, target.box, threshold) for one in objects for target in targets
    )
