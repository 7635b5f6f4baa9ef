"""Interface of a tracker, which takes a job's settings, steps, validations and end."""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

from flowfleet.api.jobs import Job
from flowfleet.api.samples import EXTENSIONS
from flowfleet.extras import pip_install
from flowfleet.tracking.place import State

VIDEO: Final = "video/mp4"
TEXT: Final = "text/plain"
COLUMNS: Final = ("version", "prompt", "picture", "reward")
"""First columns of the table of a validation; a column for each score follows."""

Values = Mapping[str, float]
"""Metric → value; all are finite."""


@dataclass(frozen=True)
class Histogram:
    """Counts of equal bins from `low` to `high`."""

    low: float
    high: float
    counts: Sequence[int]

    @property
    def edges(self) -> list[float]:
        """Returns the edges of the bins: one more than there are bins."""
        width = (self.high - self.low) / len(self.counts)
        return [self.low + width * number for number in range(len(self.counts))] + [self.high]

    def quantile(self, part: float) -> float:
        """The value below which this part of the counts lies, linear inside a bin."""
        left, edges = part * sum(self.counts), self.edges
        for number, count in enumerate(self.counts):
            if count and left <= count:
                return edges[number] + (edges[number + 1] - edges[number]) * left / count
            left -= count
        return self.high


@dataclass(frozen=True)
class Picture:
    """A held-out prompt as one policy version drew it."""

    prompt: str
    group: int
    index: int
    reward: float | None
    scores: Mapping[str, float | None]
    media: bytes | None
    """Encoded picture or video; None where the controller no longer keeps it."""
    media_type: str

    @property
    def name(self) -> str:
        """Stays the same for every version."""
        return f"{self.group:04d}-{self.index}"

    @property
    def text(self) -> str | None:
        """The answer of a policy that writes text; None for other media."""
        is_text = self.media is not None and self.media_type == TEXT
        return (self.media or b"").decode("utf-8", "replace") if is_text else None

    def write(self, folder: Path) -> Path:
        """Writes the file; `media` must be there."""
        assert self.media is not None
        path = folder / f"{self.name}.{EXTENSIONS.get(self.media_type, 'bin')}"
        path.write_bytes(self.media)
        return path


class Tracker(Protocol):
    """Tracker of a job. Each call returns once the tracker, or its own process, has the data."""

    def open(self, job: Job, state: State) -> str:
        """Creates the run, or resumes `state.run`, and returns its name in the tracker."""

    def step(self, number: int, values: Values, histograms: Mapping[str, Histogram], at: datetime) -> None:
        """Takes a training step."""

    def validation(self, version: int, values: Values, pictures: Sequence[Picture], at: datetime) -> None:
        """Takes the held-out prompts of a policy version."""

    def model(self, folder: Path, job: Job) -> None:
        """Takes the final adapter, a folder that is removed afterwards."""

    def finish(self, job: Job) -> None:
        """Ends the run: the job has ended."""

    def close(self) -> None:
        """Releases open resources; the run continues."""


def table_of(version: int, pictures: Sequence[Picture], shown: Iterable[object]) -> tuple[list[Any], list[list[Any]]]:
    """Columns and rows of the table of a validation: `COLUMNS`, then all scores as they are first seen; `shown` stands
    for the pictures."""
    names = list(dict.fromkeys(name for picture in pictures for name in picture.scores))
    rows = [
        [version, picture.prompt, media, picture.reward, *map(picture.scores.get, names)]
        for picture, media in zip(pictures, shown, strict=True)
    ]
    return [*COLUMNS, *names], rows


def media_of(picture: Picture, folder: Path, image: Callable[[str], Any], video: Callable[[str], Any]) -> Any:
    """Returns a text as it is, other media as the tracker's object of a file in `folder`; None without media."""
    if picture.media is None or picture.text is not None:
        return picture.text
    return (video if picture.media_type == VIDEO else image)(str(picture.write(folder)))


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for files that a tracker copies."""
    return tempfile.TemporaryDirectory(prefix="flowfleet-track-")


def missing(extra: str, error: ImportError) -> ValueError:
    """The error of a tracker that is not installed."""
    package = (error.name or extra).partition(".")[0]
    return ValueError(f"{package} is not installed: {pip_install(extra)}")
