"""Reads what a job's data name, where the operator lets it (places.py), by a process without secrets (reader.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flowfleet.media.files import PICTURE_TYPES
from services.controller.prompts.data import Kind, Prompt, parse_prompts
from services.controller.reading.places import Places, is_remote
from services.controller.reading.reader import Reader

MAX_PROMPT_BYTES = 1 << 30
FIRST_BYTES = 1 << 20
"""Read of a file of which the first line alone is wanted."""


class Unread(ValueError):
    """The file or host did not answer as it should; the next try may succeed."""


class Sources:
    """Blocking. What is remote is fetched by `read` alone. `networks` are those that hosts may be in, besides public
    ones."""

    def __init__(self, places: Places, networks: Sequence[str] = ()) -> None:
        self.places = places
        self.reader = Reader([url.partition(":")[0] for url in places.urls], networks)

    def close(self) -> None:
        """Ends the processes that read."""
        self.reader.close()

    def read(self, place: str, limit: int) -> bytes:
        """The first `limit` bytes. Raises NotAllowed (a ValueError), FileNotFoundError, and OSError for the rest."""
        self.places.check(place)
        if is_remote(place):
            return self.reader.fetch(place, limit)
        descriptor = self.places.open(place)
        try:
            return self.reader.read_file(descriptor, limit)
        finally:
            os.close(descriptor)

    def picture_size(self, place: str, media_type: str) -> tuple[int, int]:
        """Width and height, as they are shown, by the header of a picture on this machine. Raises ValueError."""
        descriptor = self.places.open(place)
        try:
            return self.reader.picture_size(descriptor, PICTURE_TYPES[media_type])
        except OSError as error:
            raise ValueError(f"{place} is no readable {media_type}: {error}") from None
        finally:
            os.close(descriptor)

    def prompts(self, place: str, kind: Kind = "prompts") -> list[Prompt]:
        """Raises ValueError as `parse_prompts`, also for a file that is missing, and Unread for one that is unreadable
        now."""
        too_large = not is_remote(place) and self._size(place) > MAX_PROMPT_BYTES  # weights, say: not read at all
        data = b"" if too_large else self._prompt_bytes(place, MAX_PROMPT_BYTES + 1)
        if too_large or len(data) > MAX_PROMPT_BYTES:
            raise ValueError(f"{place!r} is too large: a prompt file has at most {MAX_PROMPT_BYTES} bytes")
        return parse_prompts(data, place, kind)

    def first_prompt(self, place: str) -> Prompt:
        """The first prompt of a file, of which only the start is read. Raises as `prompts`."""
        data = self._prompt_bytes(place, FIRST_BYTES)
        first = next((line for line in data.splitlines() if line.strip()), b"")
        return parse_prompts(first, place)[0]

    def _size(self, place: str) -> int:
        """Bytes of a file; 0 where it cannot be opened, which reading it tells."""
        try:
            descriptor = self.places.open(place)
        except OSError:
            return 0
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def _prompt_bytes(self, place: str, limit: int) -> bytes:
        try:
            return self.read(place, limit)
        except OSError as error:
            kind = ValueError if isinstance(error, FileNotFoundError) else Unread
            raise kind(f"{place}: prompts cannot be read: {error}") from None
