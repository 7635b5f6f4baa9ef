"""What a scorer is: a class that gives each decoded picture or video of a batch a score or says why there is none.

To add one: subclass `Scorer`, fill its class attributes, read the request's parameters in `parse` and score in `score`.
The service does the rest: transport, decoding, batching, limits, metrics, and the refusal of non-finite scores.
`score` runs in one worker thread, one batch at a time; a batch holds samples of several callers with equal parameters,
and may be one part of a larger one that several processes with a scorer each share.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from PIL import Image

from flowfleet.media import Frames
from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, Modality

Params = TypeVar("Params")


MAX_PICTURES = 8
"""Pictures that a scorer of pictures looks at in a video."""


@dataclass(frozen=True, eq=False)
class Sample:
    """What a scorer sees: decoded RGB frames, of which a picture has one, its prompt, and the metadata of the prompt's
    line in the data set."""

    frames: Frames
    """(F, H, W, 3) uint8."""
    prompt: str
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_picture(cls, image: Image.Image, prompt: str, metadata: Mapping[str, str] | None = None) -> Sample:
        """A sample of one RGB picture."""
        return cls(np.asarray(image)[None], prompt, metadata or {})

    @property
    def image(self) -> Image.Image:
        """The picture; of a video the first frame."""
        return Image.fromarray(self.frames[0])

    def pictures(self, limit: int = MAX_PICTURES) -> list[Image.Image]:
        """The picture; of a video all frames or, evenly spaced from the first to the last, `limit` of them."""
        places = np.linspace(0, len(self.frames) - 1, min(limit, len(self.frames))).round().astype(int)
        return [Image.fromarray(self.frames[place]) for place in places]


@dataclass(frozen=True)
class Score:
    """A score and its named components; all must be finite, else the service turns it into a `Problem`."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Problem:
    """Why a sample has no score. `reason` is a short name that metrics count by; `message` says what to change."""

    reason: str
    message: str


Outcome = Score | Problem


def mean_score(scores: Sequence[Score]) -> Score:
    """The means of the values and of each component, exactly rounded; of one score itself. For scorers of pictures that
    take videos too: at least one, all with the same components."""

    def mean(numbers: Sequence[float]) -> float:
        return math.fsum(numbers) / len(numbers)

    components = {name: mean([score.components[name] for score in scores]) for name in scores[0].components}
    return Score(mean([score.value for score in scores]), components)


class Scorer(ABC, Generic[Params]):
    """A reward. The class attributes are what `Describe` answers."""

    name: ClassVar[str]
    version: ClassVar[str]
    """Changes whenever the same media and prompt could get another score."""
    modalities: ClassVar[tuple[Modality.ValueType, ...]] = (MODALITY_IMAGE,)
    """What it scores; samples of another modality get a `Problem` from the service and never reach it."""
    score_range: ClassVar[tuple[float, float]]
    """Least and greatest score; ±inf where there is no bound."""
    components: ClassVar[tuple[str, ...]] = ()
    heavy: ClassVar[bool] = False
    """Takes a CPU long for a picture: by default it is run in several processes, where there are CPUs for them."""

    @abstractmethod
    def parse(self, params: Mapping[str, str]) -> Params:
        """The request's parameters as a hashable value: requests with equal values share a batch. ValueError names
        the parameter to change."""

    @abstractmethod
    def score(self, samples: Sequence[Sample], params: Params) -> list[Outcome]:
        """One outcome a sample, in order."""


def read_params(params: Mapping[str, str], readers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Reads each parameter with the reader of its name, which raises ValueError for a bad value.

    Raises ValueError for an unknown parameter, naming the valid ones, and for a bad value, naming the parameter.
    """
    for name in params:
        if name not in readers:
            raise ValueError(f"params.{name} is unknown: this scorer takes {', '.join(readers) or 'no parameters'}")
    return {name: _read(name, text, readers[name]) for name, text in params.items()}


def _read(name: str, text: str, reader: Callable[[str], Any]) -> Any:
    try:
        return reader(text)
    except ValueError as error:
        raise ValueError(f"params.{name} = {text!r}: {error}") from error


def one_of(*choices: str) -> Callable[[str], str]:
    """Reader of a parameter with a fixed set of values."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"say one of {', '.join(choices)}")
        return text

    return read


def boolean(text: str) -> bool:
    """Reader of "true" and "false"."""
    return one_of("true", "false")(text.lower()) == "true"
