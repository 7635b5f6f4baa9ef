"""Prompts of a data set, and the media types of their files by suffix."""

import unicodedata
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from flowfleet.limits import MAX_IMAGES, MAX_METADATA_BYTES, MAX_PROMPT_BYTES, check_bytes

Kind = Literal["prompts", "preferences"]

PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
VIDEOS = {".mp4": "video/mp4"}
SOUNDS = {".wav": "audio/wav", ".mp3": "audio/mpeg", ".flac": "audio/flac", ".ogg": "audio/ogg"}
MEDIA_TYPES = PICTURES | VIDEOS | SOUNDS
"""Media type by a file's suffix."""
_UNSEEN = frozenset({"Zs", "Zl", "Zp", "Cc", "Cf"})
"""Unicode's categories of spaces and controls."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt from a line or row of a data set."""

    text: str
    metadata: dict[str, str] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    """Condition images, absolute or URLs; of a question its pictures, then sounds, then films."""
    media: tuple[str, ...] = ()
    """The chosen and the rejected medium of a preference."""
    negative: str | None = None
    """Negative prompt in place of the job's."""
    origin: str = ""
    """Name of the job's source that it is of; empty where the job has `data.train`."""
    source: str = field(default="", compare=False)
    """file:line or file:row, for messages."""
    size: tuple[int, int] | None = None
    """Width and height of its samples; None: the job's."""


def checked(prompt: Prompt) -> Prompt:
    """Returns the same prompt. Raises ValueError where it is empty, or larger than the fleet takes."""
    if all(unicodedata.category(character) in _UNSEEN for character in prompt.text):
        raise ValueError("the prompt is empty: write one, or remove the row")
    check_bytes("the prompt", len(prompt.text.encode()), MAX_PROMPT_BYTES)
    if prompt.negative:
        check_bytes("the negative prompt", len(prompt.negative.encode()), MAX_PROMPT_BYTES)
    size_bytes = sum(len(text.encode()) for text in (*prompt.metadata, *prompt.metadata.values()))
    check_bytes("metadata", size_bytes, MAX_METADATA_BYTES)
    if len(prompt.images) > MAX_IMAGES:
        raise ValueError(f"{len(prompt.images)} images, sounds and films: give at most {MAX_IMAGES}")
    return prompt


def media_type(url: str) -> str:
    """Media type of a file by its suffix. Raises ValueError for an unknown suffix."""
    suffix = PurePath(url).suffix.lower()
    if suffix not in MEDIA_TYPES:
        raise ValueError(f"{url}: its suffix tells no media type; known are {', '.join(MEDIA_TYPES)}")
    return MEDIA_TYPES[suffix]


def beside(url: str, path: str) -> str:
    """Where a medium of a data set is: as written if absolute or a URL, else in the data set's directory."""
    media_type(path)
    if "://" in path or PurePath(path).is_absolute():
        return path
    directory, slash, _ = url.rpartition("/")
    return f"{directory}{slash}{path}"
