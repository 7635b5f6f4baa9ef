"""Base classes of scorers. A scorer gives each picture, video or text of a batch a score, or says why there is none.

There are two kinds. A `Scorer` computes: it gets decoded frames, in a worker thread or in processes of a pool, one
batch at a time. An `AsyncScorer` asks another service: it gets the encoded bytes on the event loop, many calls at once.
To add one: subclass either, fill its attributes, read the request's parameters in `parse`, score in `score`, and write
`make(name, settings, num_threads)` next to it, which the registry calls. The service does the rest: transport,
decoding, batching, limits, metrics, and the refusal of non-finite scores.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from flowfleet.media.files import Frames
from flowfleet.media.sound import SOUND_RATE
from flowfleet.part import Part, in_words
from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, Modality
from flowfleet.rewards.gradients import PixelInput, Pixels
from flowfleet.rewards.requests import EncodedSample

Params = TypeVar("Params")
Number = TypeVar("Number", int, float)


NO_FRAMES: Final[Frames] = np.empty((0, 1, 1, 3), np.uint8)
"""Empty frames, which a text has."""

NO_SOUND: Final[NDArray[np.float32]] = np.empty(0, np.float32)

MAX_PICTURES = 8
"""Pictures that a scorer of pictures looks at in a video."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Sample as a scorer gets it: decoded RGB frames, of which a picture has one, or a text; its prompt, and the
    metadata of the prompt's line in the data set."""

    frames: Frames
    """(F, H, W, 3) uint8; a text has none."""
    prompt: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    group_id: str = ""
    """Id shared by the samples of one prompt, which are compared with one another."""
    sample_id: str = ""
    media_size: int = 0
    """Bytes of the file that the frames or the text were decoded from."""
    text: str = ""
    """The answer, for scorers of `MODALITY_TEXT`."""
    sound: NDArray[np.float32] = field(default_factory=lambda: NO_SOUND)
    """(samples,) from -1 to 1, one channel of the scorer's `sound_rate`, for scorers of `MODALITY_SOUND`."""

    @classmethod
    def of_text(cls, text: str, prompt: str, metadata: Mapping[str, str] | None = None) -> Sample:
        """Makes a sample of one answer."""
        return cls(NO_FRAMES, prompt, metadata or {}, text=text)

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
    media_size: int = field(default=0, compare=False)
    """Bytes of the file that was scored, which the evaluator notes; 0: not known."""


@dataclass(frozen=True)
class Problem:
    """Why a sample has no score. `reason` is a short name that metrics count by; `message` says what to change."""

    reason: str
    message: str


@dataclass(frozen=True)
class Pending:
    """Says that a sample has no score yet, with what it waits for. The caller asks again. Only of a scorer that
    `may_wait`."""

    message: str


Outcome = Score | Problem | Pending


@dataclass(frozen=True, eq=False)
class ScoreGradient:
    """A score and how fast it rises with each pixel; all must be finite, else the service turns it into a `Problem`."""

    value: float
    gradient: Pixels
    """float32 of the pixels' shape, (3, height, width)."""
    components: Mapping[str, float] = field(default_factory=dict)


GradientOutcome = ScoreGradient | Problem


def mean_score(scores: Sequence[Score]) -> Score:
    """The means of the values and of each component, exactly rounded; of one score itself. For scorers of pictures that
    take videos too: at least one, all with the same components."""
    components = {name: fmean([score.components[name] for score in scores]) for name in scores[0].components}
    return Score(fmean([score.value for score in scores]), components)


@dataclass(frozen=True)
class ProcessLimits:
    """How processes of a pool are handed the samples of a scorer."""

    max_part: int = 8
    """Samples handed over at a time; whole groups, where the scorer needs them, are never cut."""
    base_s: float = 40.0
    """A part that takes longer than this and `sample_s` for each of its samples hangs: its process is killed. By
    default twenty times what the OCR reader takes for a page, yet at most `timeouts.hang_s` as a job has it by default
    for a part of the default size."""
    sample_s: float = 10.0
    setting: str = ""
    """The scorer's setting that these seconds come from."""

    def seconds(self, num_samples: int) -> float:
        """Time that a process may take for so many samples."""
        return self.base_s + self.sample_s * num_samples


class _Described(ABC, Generic[Params]):
    """Describes a scorer, for `Describe`, in attributes of the class or of the object."""

    name: str
    version: str
    """Changes whenever the same media and prompt could get another score. For a scorer with a checkpoint or a rubric it
    holds their hash."""
    pinned: Mapping[str, Any] | None = None
    """Settings that make the same scorer in another process, where names of the Hub are folders; None: those that it
    was made with."""
    modalities: tuple[Modality.ValueType, ...] = (MODALITY_IMAGE,)
    """Modalities that it scores. Samples of another modality get a `Problem` from the service and never reach it."""
    sound_rate: int = SOUND_RATE
    """Samples per second of a sound, for scorers of `MODALITY_SOUND`."""
    score_range: tuple[float, float]
    """Least and greatest score; ±inf where there is no bound."""
    components: tuple[str, ...] = ()
    needs_group: bool = False
    """Compares the samples of a group: those of one call with equal `group_id` reach `score` together."""
    may_wait: bool = False
    """May answer `Pending`."""
    call_bytes: int = 0
    """Preferred maximum size of a call: scoring begins while the rest is in transfer. 0: large batches gain more."""

    @abstractmethod
    def parse(self, params: Mapping[str, str]) -> Params:
        """The request's parameters as a hashable value: requests with equal values share a batch. ValueError names
        the parameter to change."""


class Scorer(_Described[Params]):
    """A reward that is computed here. `score` runs in one thread, one batch at a time; a batch holds samples of several
    callers with equal parameters, and may be one part of a larger one that several processes with a scorer each share.
    """

    heavy: bool = False
    """Takes a CPU long for a picture: by default it is run in several processes, where there are CPUs for them."""
    isolated: bool = False
    """Runs code of others: never in the service's own process, even where one process scores."""
    gives_gradient: bool = False
    """Has `score_with_gradient`. Offered where the service's own process scores."""
    process_limits: ProcessLimits = ProcessLimits()
    call_bytes = 2**22
    """Seven PNGs of 512 x 512 that are full of noise. 0 is better for a model, whose forward pass takes a batch."""

    def start(self) -> None:
        """Loads what `score` needs: called once, in the process that scores, before the first batch. The object that
        parses and describes in the service's own process is not started where a pool scores."""

    @abstractmethod
    def score(self, samples: Sequence[Sample], params: Params) -> list[Outcome]:
        """Scores the samples and returns one outcome per sample, in order."""

    def score_with_gradient(self, samples: Sequence[PixelInput], params: Params) -> list[GradientOutcome]:
        """Scores the samples with gradients and returns one outcome per sample, in order. Called where `gives_gradient`
        is set. Scores are those of the pixels as they are, not rounded to 8 bits."""
        raise NotImplementedError(f"scorer {self.name} gives no gradient")


class PlainScorer(Scorer[None]):
    """A scorer whose requests take no parameters."""

    def parse(self, params: Mapping[str, str]) -> None:
        read_params(params, {})


class AsyncScorer(_Described[Params]):
    """A reward that asks others, over a network. Nothing of it may block the event loop."""

    async def start(self) -> None:
        """Opens what `score` needs. Called once, in the event loop, before the first call."""

    async def close(self) -> None:
        """Called once, when no call of `score` runs any more."""

    @abstractmethod
    async def score(self, samples: Sequence[EncodedSample], params: Params) -> list[Outcome]:
        """Scores the samples and returns one outcome per sample, in order. Of the media only the header has been read.
        Each call of the service makes one call here; many run at once, and each is cancelled with its own. Raises
        `flowfleet.errors.Unavailable`, saying why, where nothing can be scored now."""


AnyScorer = Scorer[Any] | AsyncScorer[Any]


class ScorerSettings(Part):
    """Base of what a service's `--settings` and `--set` say to one scorer: strict, frozen, no unknown keys."""

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        """ValueError with one line a problem, each naming its setting and what to change."""
        try:
            return cls.model_validate(dict(settings))
        except ValidationError as error:
            raise ValueError("\n".join(cls._explain(item) for item in error.errors(include_url=False))) from None

    @classmethod
    def _explain(cls, item: Any) -> str:
        name = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, cls.model_fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(cls.model_fields) or 'none'}"
            return f"settings.{name}: unknown setting; {hint}"
        message = in_words(item)
        return f"settings.{name}: {message[0].lower()}{message[1:]}" if name else message


class NoSettings(ScorerSettings):
    """Settings of a scorer that has none."""


def score_range(low: float | None, high: float | None) -> tuple[float, float]:
    """Score range from the settings `score_min` and `score_max`; None means unbounded. Raises ValueError if they are
    not in order."""
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    if bounds[0] >= bounds[1]:
        raise ValueError(f"settings.score_min {low} must be below settings.score_max {high}")
    return bounds


def numbers_of(answer: Mapping[str, Any], components: Sequence[str]) -> tuple[float, dict[str, float]]:
    """`score`, and those of the named components that are there, of what somebody else gave for a sample. ValueError,
    which says what it is, for one that is missing or not a number: text is never read as one."""
    if "score" not in answer:
        raise ValueError(f"no score, but {', '.join(map(str, answer)) or 'nothing'}")
    return _number("score", answer["score"]), {
        name: _number(name, answer[name]) for name in components if name in answer
    }


def _number(name: str, value: Any) -> float:
    if isinstance(value, str | bytes) or value is None:
        raise ValueError(f"{value!r:.80} as {name}, which is no number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{value!r:.80} as {name}, which is no number") from None


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


def number(read: Callable[[str], Number], fits: Callable[[Number], bool], hint: str) -> Callable[[str], Number]:
    """Reader of a number by `int` or `float`; one that does not fit raises ValueError with the hint."""

    def checked(text: str) -> Number:
        if not fits(value := read(text)):
            raise ValueError(hint)
        return value

    return checked


def boolean(text: str) -> bool:
    """Reader of "true" and "false"."""
    return one_of("true", "false")(text.lower()) == "true"
