"""Reads what a job's data name, where the operator lets it (places.py)."""

from __future__ import annotations

import os

import fsspec

from flowfleet.media import shown_size
from services.controller.data import Kind, Prompt, parse_prompts
from services.controller.places import Places, is_remote

MAX_PROMPT_BYTES = 1 << 30
FIRST_BYTES = 1 << 20
"""Read of a file of which the first line alone is wanted."""


class Sources:
    """Blocking. What is remote is fetched by `read` alone."""

    def __init__(self, places: Places) -> None:
        self.places = places

    def read(self, place: str, limit: int) -> bytes:
        """The first `limit` bytes. Raises NotAllowed (a ValueError), FileNotFoundError, and OSError for the rest."""
        self.places.check(place)
        if not is_remote(place):
            with os.fdopen(self.places.open(place), "rb") as file:
                return file.read(limit)
        try:
            with fsspec.open(place, "rb") as file:
                data: bytes = file.read(limit)
                return data
        except (ValueError, ImportError) as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def picture_size(self, place: str, media_type: str) -> tuple[int, int]:
        """Width and height by the header of a picture on this machine. Raises ValueError and OSError."""
        with os.fdopen(self.places.open(place), "rb") as file:
            return shown_size(file, media_type, place)

    def prompts(self, place: str, kind: Kind = "prompts") -> list[Prompt]:
        """Raises ValueError as `parse_prompts`, also for a file that cannot be read."""
        data = self._prompt_bytes(place, MAX_PROMPT_BYTES + 1)
        if len(data) > MAX_PROMPT_BYTES:
            raise ValueError(f"{place!r} is too large: a prompt file has at most {MAX_PROMPT_BYTES} bytes")
        return parse_prompts(data, place, kind)

    def first_prompt(self, place: str) -> Prompt:
        """Of a file of prompts, of which only the start is read. Raises as `prompts`."""
        data = self._prompt_bytes(place, FIRST_BYTES)
        first = next((line for line in data.splitlines() if line.strip()), b"")
        return parse_prompts(first, place)[0]

    def _prompt_bytes(self, place: str, limit: int) -> bytes:
        try:
            return self.read(place, limit)
        except OSError as error:
            raise ValueError(f"{place}: prompts cannot be read: {error}") from None
