"""What a scorer is: a class that gives each decoded picture of a batch a score or says why there is none.

To add one: subclass `Scorer`, fill its class attributes, read the request's parameters in `parse` and score in `score`.
The service does the rest: transport, decoding, batching, limits, metrics, and the refusal of non-finite scores.
`score` runs in one worker thread, one batch at a time; a batch holds samples of several callers with equal parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from PIL.Image import Image

from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, Modality

Params = TypeVar("Params")


@dataclass(frozen=True)
class Sample:
    """What a scorer sees: a decoded RGB picture, its prompt, and the metadata of the prompt's line in the data set."""

    image: Image
    prompt: str
    metadata: Mapping[str, str] = field(default_factory=dict)


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


class Scorer(ABC, Generic[Params]):
    """A reward. The class attributes are what `Describe` answers."""

    name: ClassVar[str]
    version: ClassVar[str]
    """Changes whenever the same picture and prompt could get another score."""
    modalities: ClassVar[tuple[Modality.ValueType, ...]] = (MODALITY_IMAGE,)
    score_range: ClassVar[tuple[float, float]]
    """Least and greatest score; ±inf where there is no bound."""
    components: ClassVar[tuple[str, ...]] = ()

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
