"""`python`: a function of yours as a reward, by its import path, in a process of its own.

The function gets decoded media, in order: a picture (PIL, RGB), the frames of a video ((F, H, W, 3) uint8) or a
text, the prompt, and the metadata of the prompt's line; `params` that the settings name come as keyword arguments of
text.

    def redness(picture, prompt, metadata):             # one at a time
        return picture.resize((1, 1)).getpixel((0, 0))[0] / 255

    def sizes(pictures, prompts, metadata):             # settings.batch: lists in, a list out
        return [picture.width for picture in pictures]

It gives a number, or a mapping with `score` and components; a batch gives one of these a sample, and may put them first
in a pair, as flow_grpo's reward functions do. What it prints goes to the log. Where it raises on a batch, it gets each
sample once more by itself; what it raises then becomes that sample's error, with type and message. What it takes longer
than `time_limit_s`, or crashes, kills its process alone. An object that can be called may have a method `start`, which
loads what it needs; what that raises ends the service. With `gradient` the function computes with torch instead, in the
service's process: gradient.py.
"""

import contextlib
import hashlib
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from flowfleet.extras import pip_install
from flowfleet.job.fingerprints import CHANGED, OF_A_FILE
from flowfleet.proto.reward_pb2 import MODALITY_IMAGE, MODALITY_TEXT, MODALITY_VIDEO
from services.reward.execution.evaluator import FAILED
from services.reward.scorer import (
    Outcome,
    Problem,
    ProcessLimits,
    Sample,
    Score,
    Scorer,
    ScorerSettings,
    numbers_of,
    read_params,
    score_range,
)

HASH_DIGITS = 12

log = logging.getLogger(__name__)

Params = tuple[tuple[str, str], ...]
Item = TypeVar("Item")
Result = TypeVar("Result")

_MODALITY: Final = {"picture": MODALITY_IMAGE, "frames": MODALITY_VIDEO, "text": MODALITY_TEXT}
_MEDIUM: Final[Mapping[str, Callable[[Sample], Any]]] = {
    "picture": lambda sample: sample.image,
    "frames": lambda sample: sample.frames,
    "text": lambda sample: sample.text,
}


class PythonSettings(ScorerSettings):
    function: str
    """MODULE:FUNCTION."""
    path: Path | None = None
    """Directory that is searched for modules first."""
    batch: int = Field(default=1, ge=1, le=256)
    """Maximum samples per call; above 1 the function gets lists."""
    video: bool = False
    """Pass frames of videos instead of pictures."""
    text: bool = False
    """Pass texts instead of pictures."""
    gradient: bool = False
    """Give gradients: the function gets float32 torch tensors (B, 3, H, W) from 0 to 1 and returns a differentiable
    tensor of B scores."""
    time_limit_s: float = Field(default=30.0, gt=0.0, le=3600.0)
    """Limit on one call; beyond it the process is killed and each sample retried once."""
    name: str = Field(default="python", min_length=1)
    """Name in Describe."""
    version: str = ""
    """Version; unset: a hash of the module's file."""
    score_min: float | None = None
    score_max: float | None = None
    """Bounds of the score; unset: none."""
    params: tuple[str, ...] = ()
    """Parameters that a job may set: keyword arguments, as text."""
    components: tuple[str, ...] = ()
    """Components that the function returns."""

    @property
    def media(self) -> str:
        """Name of the function's first argument."""
        return "frames" if self.video else "text" if self.text else "picture"

    @field_validator("text")
    @classmethod
    def _one_kind(cls, text: bool, info: ValidationInfo) -> bool:
        if text and info.data.get("video"):
            raise ValueError("set video or text, not both")
        return text

    @field_validator("gradient")
    @classmethod
    def _of_pictures(cls, gradient: bool, info: ValidationInfo) -> bool:
        if gradient and (kind := next((name for name in ("video", "text") if info.data.get(name)), None)):
            raise ValueError(f"only pictures have gradients: leave out gradient, or settings.{kind}")
        return gradient

    @model_validator(mode="after")
    def _no_limit(self) -> Self:
        if self.gradient and "time_limit_s" in self.model_fields_set:
            raise ValueError(
                "settings.time_limit_s ends a process of the function's own, and with settings.gradient it has none: "
                "leave it out, and set --hang-s of the service"
            )
        return self

    @field_validator("function")
    @classmethod
    def _import_path(cls, text: str) -> str:
        module, colon, name = text.partition(":")
        if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f'{text!r} is no import path: write "module:function"')
        return text


class PythonFunction(Scorer[Params]):
    """The function that the settings name. Its module is imported by `start` alone, in the process that scores."""

    isolated = True

    def __init__(self, settings: PythonSettings) -> None:
        self._settings = settings
        self.name = settings.name
        self.version = settings.version or _file_hash(settings)
        self.pinned = settings.model_dump(mode="json", exclude_unset=True) | {"version": self.version}
        self._is_changed = False
        self.modalities = (_MODALITY[settings.media],)
        self.score_range = score_range(settings.score_min, settings.score_max)
        self.components = settings.components
        self.call_bytes = Scorer.call_bytes if settings.batch == 1 else 0
        self.process_limits = ProcessLimits(settings.batch, settings.time_limit_s, 0.0, "settings.time_limit_s")
        self._function: Callable[..., Any]

    def start(self) -> None:
        """ValueError for a module that has no such function, or one of other arguments; whatever its import and its own
        `start` raise."""
        module, _, name = self._settings.function.partition(":")
        self._is_changed = self.version.startswith(OF_A_FILE) and self.version != _file_hash(self._settings)
        if self._is_changed:  # a process that replaces another one
            return
        if self._settings.path is not None:
            sys.path.insert(0, str(self._settings.path.resolve()))
        with _printing_to_log():
            function = getattr(importlib.import_module(module), name, None)
        if not callable(function):
            raise ValueError(f"settings.function {self._settings.function}: {module} has no function {name}")
        _check_arguments(function, self._settings)
        if prepare := getattr(function, "start", None):
            with _printing_to_log():
                prepare()
        self._function = function

    def parse(self, params: Mapping[str, str]) -> Params:
        return tuple(sorted(read_params(params, dict.fromkeys(self._settings.params, str)).items()))

    def score(self, samples: Sequence[Sample], params: Params) -> list[Outcome]:
        if self._is_changed:
            self.start()  # the former file may be back
        if self._is_changed:
            return [Problem(FAILED, f"the file of {self._settings.function} {CHANGED}")] * len(samples)
        return self.guarded(samples, lambda part: self._scored(part, dict(params)))

    def guarded(
        self, samples: Sequence[Item], call: Callable[[Sequence[Item]], list[Result]]
    ) -> list[Result | Problem]:
        """Returns what `call` makes of the samples. If it raises, calls it again for each sample alone."""
        try:
            with _printing_to_log():
                return list(call(samples))
        except Exception as error:
            log.exception("%s raised on %d samples", self._settings.function, len(samples))
            if len(samples) > 1:
                return [outcome for sample in samples for outcome in self.guarded([sample], call)]
            return [Problem(FAILED, f"{self._settings.function} raised {type(error).__name__}: {error}")]

    def _scored(self, samples: Sequence[Sample], params: Mapping[str, str]) -> list[Outcome]:
        results = self._call(samples, params)
        if len(results) != len(samples):
            text = f"{self._settings.function} gave {len(results)} scores for {len(samples)} samples"
            return [Problem(FAILED, text)] * len(samples)
        return [self._outcome(result) for result in results]

    def _call(self, samples: Sequence[Sample], params: Mapping[str, str]) -> list[Any]:
        media = [_MEDIUM[self._settings.media](sample) for sample in samples]
        prompts, metadata = [sample.prompt for sample in samples], [dict(sample.metadata) for sample in samples]
        if self._settings.batch == 1:
            return [self._function(*one, **params) for one in zip(media, prompts, metadata, strict=True)]
        given = self._function(media, prompts, metadata, **params)
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
            given = given[0]
        return list(given)

    def _outcome(self, result: Any) -> Outcome:
        numbers = as_mapping(result)
        try:
            value, components = numbers_of(numbers, self.components)
        except ValueError as error:
            return Problem("not_a_number", f"{self._settings.function} gave {error}")
        return Score(value, components)


def as_mapping(result: Any) -> Mapping[str, Any]:
    """Names what a function gave: it may give `(score, components)`, as a served reward does, or a mapping."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return {**result[1], "score": result[0]}
    return result if isinstance(result, Mapping) else {"score": result}


def make(name: str, settings: Mapping[str, Any], num_threads: int) -> PythonFunction:
    read = PythonSettings.read(settings)
    if not read.gradient:
        return PythonFunction(read)
    if find_spec("torch") is None:
        raise ValueError(f"settings.gradient needs torch, which is not installed: {pip_install('reward-models')}")
    from services.reward.scorers.python.gradient import DifferentiableFunction

    return DifferentiableFunction(read, num_threads)


def _check_arguments(function: Callable[..., Any], settings: PythonSettings) -> None:
    """Raises ValueError for a function that does not take what it is called with."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(None, None, None, **dict.fromkeys(settings.params, ""))
    except TypeError as error:
        is_single = settings.batch == 1 and not settings.gradient
        media = settings.media if is_single or settings.video else f"{settings.media}s"
        taken = [media, "prompt" if is_single else "prompts", "metadata"]
        name = settings.function.partition(":")[2]
        raise ValueError(
            f"settings.function {settings.function}: it takes {signature}, and a call gives it other arguments "
            f"({error}): write def {name}({', '.join([*taken, *settings.params])})"
        ) from None


def _file_hash(settings: PythonSettings) -> str:
    """Hash of the module's file, which is found without importing anything."""
    module = settings.function.partition(":")[0]
    folders = [str(settings.path), *sys.path] if settings.path is not None else None
    spec = None
    for depth in range(1, module.count(".") + 2):
        spec = PathFinder.find_spec(".".join(module.split(".")[:depth]), folders)
        if spec is None:
            raise ValueError(
                f"settings.function: module {module} is not found: set settings.path to the directory that has it"
            )
        folders = list(spec.submodule_search_locations or [])
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return "unknown"
    return f"{OF_A_FILE}{hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:HASH_DIGITS]}"


class _LogLines:
    """A text stream that logs each line."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            log.log(self._level, "%s", line)
        return len(text)

    def flush(self) -> None:
        if self._rest:
            self.write("\n")

    def isatty(self) -> bool:
        return False


@contextlib.contextmanager
def _printing_to_log() -> Iterator[None]:
    out, err = _LogLines(logging.INFO), _LogLines(logging.WARNING)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    finally:
        out.flush()
        err.flush()
