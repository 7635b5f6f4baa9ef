"""Samples as the REST API shows them, and the files of their media."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import Field, PrivateAttr

from flowfleet.api.answers import Answer, FiniteOrNone

Purpose = Literal["train", "validate"]

EXTENSIONS: Final = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/webp": "webp",
    "video/mp4": "mp4",
    "text/plain": "txt",
}
"""Media type of a sample → ending of its file's name."""


class Sample(Answer):
    step: int = Field(ge=0)
    group: int = Field(ge=0)
    index: int = Field(ge=0)
    purpose: Purpose = "train"
    prompt: str
    source: str = ""
    """Name of the prompt's source; empty where the job has `data.train`."""
    reward: FiniteOrNone = None
    """Total of the scores, as weights, clips, curves and gates have it; null when the sample was dropped."""
    scores: dict[str, FiniteOrNone] = {}
    """Reward → raw score, and reward.component → value. A reward that was skipped has none."""
    versions: dict[str, str] = {}
    """Reward → name and version of the scorer that gave its score."""
    shadow: dict[str, FiniteOrNone] = {}
    """Shadow → raw score."""
    gated_by: str = ""
    """The reward whose gate acted on the sample."""
    policy_version: int = 0
    seed: int = 0
    drop_reason: str = ""
    """Why the sample was not trained on; empty when it was."""
    drop_cause: str = ""
    """Error in words; empty where the reason says all."""
    media_type: str = "image/png"
    replica: str = ""
    """Replica that made it."""

    _shown: _Shown = PrivateAttr(default_factory=lambda: _Shown())

    def showing(self, image: Callable[[], Any]) -> Sample:
        """The sample itself, whose `image` now gives what this call gives."""
        self._shown = _Shown(image)
        return self

    def image(self) -> Any:
        """The decoded picture (PIL, RGB) of a sample that a client gave; `await` it from an AsyncClient. ValueError for
        a video, and for a sample of another origin."""
        if self._shown.image is None:
            raise ValueError("only samples that a client gave know their picture: call the client's `image`")
        return self._shown.image()


@dataclass
class _Shown:
    """Has no part in comparing samples: all of these are equal."""

    image: Callable[[], Any] | None = field(default=None, compare=False)
