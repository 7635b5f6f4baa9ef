"""Prompts and preference pairs: read once a job, dealt out by step. Which prompt a group of a step gets is a pure
function of the seed."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import PurePath
from typing import Any, Literal

import numpy as np

from flowfleet.limits import MAX_IMAGES, MAX_METADATA_BYTES, MAX_PROMPT_BYTES, check_bytes
from flowfleet.seeds import derive_seed

Kind = Literal["prompts", "preferences"]

PICTURES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
VIDEOS = {".mp4": "video/mp4"}
MEDIA_TYPES = PICTURES | VIDEOS
"""Media types by file suffix."""
MAX_PROMPTS = 4_000_000
"""Lines of a data set, each of which takes some 300 bytes of memory however short it is."""
_BREAKS = tuple(map(str.encode, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"))
"""Where `str.splitlines` begins a line."""
MANY = 100_000
"""Lines from which on a data set would hold up the garbage collector."""
MAX_PASSES = 2
"""Orders that are remembered; one of a million prompts has 8 MB."""
MAX_STEPS = 32
"""Steps that are remembered: more than can be open at once."""

_SHAPES: dict[Kind, str] = {
    "prompts": '{"prompt": "…", "metadata": {…}, "images": ["…"]}, metadata and images may be left out',
    "preferences": '{"prompt": "…", "chosen": "…", "rejected": "…"} of paths or URLs; metadata and images may be added',
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a data set."""

    text: str
    metadata: dict[str, str] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    """Condition images, absolute or URLs."""
    media: tuple[str, ...] = ()
    """Media of a preference: the chosen, then the rejected."""
    source: str = field(default="", compare=False)
    """file:line, for messages."""


def parse_prompts(data: bytes, url: str, kind: Kind = "prompts") -> list[Prompt]:
    """The lines of a .txt file (one prompt a line) or a .jsonl file of objects (`DataPart`); blank lines
    are skipped, relative paths start at the file's folder.

    Raises ValueError naming the file and line that is wrong.
    """
    if kind == "preferences" and not url.endswith(".jsonl"):
        raise ValueError(f"{url}: preferences come as .jsonl, each line {_SHAPES[kind]}")
    if sum(map(data.count, _BREAKS)) > MAX_PROMPTS:
        raise ValueError(f"{url}: a prompt file has at most {MAX_PROMPTS} lines: leave some out")
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{url}: prompts cannot be read: {error}") from None
    with _uncollected(len(lines)):
        filled = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
        if not filled:
            raise ValueError(f"{url}: holds no prompt")
        if not url.endswith(".jsonl"):
            return [_line(line, f"{url}:{number}") for number, line in filled]
        return [_parse(line, url, number, kind) for number, line in filled]


@contextmanager
def _uncollected(number: int) -> Iterator[None]:
    """Keeps the garbage collector from looking at very many lines again and again, now and later: all threads stand
    still meanwhile."""
    if number < MANY:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Deal:
    """Deals `count` prompts to each step: passes through the data, each with its own shuffle, cut into steps. Nothing
    is left out. Remembers the orders of the last passes and what the last steps were given."""

    def __init__(self, prompts: list[Prompt], seed: int, count: int) -> None:
        self._prompts, self._seed, self._count = prompts, seed, count
        self._order = lru_cache(MAX_PASSES)(self._shuffled)
        self.of_step = lru_cache(MAX_STEPS)(self._dealt)
        """Gives the prompts of a step, one a group."""

    @cached_property
    def has_images(self) -> bool:
        """Whether a prompt has a condition image."""
        return any(prompt.images for prompt in self._prompts)

    def _dealt(self, step: int) -> tuple[Prompt, ...]:
        places = (divmod(step * self._count + k, len(self._prompts)) for k in range(self._count))
        return tuple(self._prompts[self._order(number)[offset]] for number, offset in places)

    def _shuffled(self, number: int) -> Any:
        """Positions of the prompts in the order of a pass."""
        return np.random.default_rng(derive_seed(self._seed, "epoch", number)).permutation(len(self._prompts))


def _checked(prompt: Prompt) -> Prompt:
    """The same prompt. Raises ValueError where it is larger than the fleet takes."""
    check_bytes("the prompt", len(prompt.text.encode()), MAX_PROMPT_BYTES)
    size_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in prompt.metadata.items())
    check_bytes("metadata", size_bytes, MAX_METADATA_BYTES)
    if len(prompt.images) > MAX_IMAGES:
        raise ValueError(f"{len(prompt.images)} images: give at most {MAX_IMAGES}")
    return prompt


def media_type(url: str) -> str:
    """Media type by the suffix. Raises ValueError for an unknown one."""
    suffix = PurePath(url).suffix.lower()
    if suffix not in MEDIA_TYPES:
        raise ValueError(f"{url}: its suffix tells no media type; known are {', '.join(MEDIA_TYPES)}")
    return MEDIA_TYPES[suffix]


def _line(text: str, where: str) -> Prompt:
    try:
        return _checked(Prompt(text, source=where))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _parse(line: str, url: str, number: int, kind: Kind) -> Prompt:
    where = f"{url}:{number}"
    try:
        record = json.loads(line)
        if "\\u" in line:
            _check_characters(record)
        media = (record["chosen"], record["rejected"]) if kind == "preferences" else ()
        images = record.get("images", [])
        if not isinstance(images, list):
            raise TypeError("a list of images, even of one")
        prompt = Prompt(
            text=str(record["prompt"]),
            metadata={str(key): _text(value) for key, value in record.get("metadata", {}).items()},
            images=tuple(_beside(url, path) for path in images),
            media=tuple(_beside(url, path) for path in media),
            source=where,
        )
        return _checked(prompt)
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{where}: expected an object like {_SHAPES[kind]}") from None
    except RecursionError:
        raise ValueError(f"{where}: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_characters(record: Any) -> None:
    """ValueError for what JSON can escape and no message can hold."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None


def _text(value: Any) -> str:
    """A value of the metadata, which are texts: objects and lists as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def _beside(url: str, path: Any) -> str:
    """A media file of a data set: as it is when absolute or a URL, else from the data set's directory."""
    if not isinstance(path, str):
        raise TypeError("a path is text")
    media_type(path)
    if "://" in path or PurePath(path).is_absolute():
        return path
    directory, slash, _ = url.rpartition("/")
    return f"{directory}{slash}{path}"
