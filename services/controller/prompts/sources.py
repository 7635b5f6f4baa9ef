"""Reads what a job's data name, where the operator lets it (places.py), by a process without secrets (reader.py)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from flowfleet.media.files import PICTURE_TYPES
from flowfleet.prompts.columns import Columns
from flowfleet.prompts.formats import MAX_PROMPTS, Format, first_prompt, format_of, parse_prompts
from flowfleet.prompts.hub import is_dataset
from flowfleet.prompts.prompt import Prompt
from flowfleet.prompts.tables import saved_files
from services.controller.reading.places import Places, is_remote
from services.controller.reading.reader import Reader

MAX_PROMPT_BYTES = 1 << 30
FIRST_BYTES = 1 << 20
"""Read of a file of which the first line alone is wanted."""
_STATE_BYTES = 1 << 20
_TABLES = ("parquet", "arrow")

T = TypeVar("T")


class Unread(ValueError):
    """The file or host did not answer as it should; the next try may succeed."""


class Missing(ValueError):
    """There is no such file, now."""


class Sources:
    """Blocking. What is remote is fetched by `read` alone. `networks` are those that hosts may be in, besides public
    ones."""

    def __init__(self, places: Places, networks: Sequence[str] = ()) -> None:
        self.places = places
        schemes = [url.partition(":")[0] for url in places.urls]
        self.reader = Reader(schemes, networks)
        self._tables = Reader(schemes, networks, tables=True)

    def close(self) -> None:
        """Ends the processes that read."""
        self.reader.close()
        self._tables.close()

    def read(self, place: str, limit: int) -> bytes:
        """The first `limit` bytes. Raises NotAllowed (a ValueError), FileNotFoundError, and OSError for the rest."""
        self.places.check(place)
        if is_remote(place):
            return self.reader.fetch(place, limit)
        return self._opened(place, lambda descriptor: self.reader.read_file(descriptor, limit))

    def picture_size(self, place: str, media_type: str) -> tuple[int, int]:
        """Width and height, as they are shown, by the header of a picture on this machine. Raises ValueError."""
        descriptor = self.places.open(place)
        try:
            return self.reader.picture_size(descriptor, PICTURE_TYPES[media_type])
        except OSError as error:
            raise ValueError(f"{place} is not a readable {media_type}: {error}") from None
        finally:
            os.close(descriptor)

    def prompts(self, place: str, columns: Columns | None = None) -> list[Prompt]:
        """Reads all prompts of a file, or of a folder that `datasets` saved. Raises ValueError as `parse_prompts`, also
        for a missing file, and Unread for one that is unreadable now."""
        columns = columns or Columns()
        if is_dataset(place):
            return self._dataset(place, columns)
        if not is_remote(place) and self.places.path(place).is_dir():
            tables = self._folder(place)
            data = b"".join(self._rows(table, "arrow", columns) for table in tables)
            return parse_prompts(data, place.rstrip("/") + "/", columns, "jsonl")
        form = format_of(place, columns)
        if not is_remote(place) and self._size(place) > MAX_PROMPT_BYTES:  # weights, say: not read at all
            raise _too_large(place)
        if form in _TABLES:
            return parse_prompts(self._rows(place, form, columns), place, columns, "jsonl")
        data = self._prompt_bytes(place, MAX_PROMPT_BYTES + 1)
        if len(data) > MAX_PROMPT_BYTES:
            raise _too_large(place)
        return parse_prompts(data, place, columns, form)

    def first_prompt(self, place: str, columns: Columns | None = None) -> Prompt:
        """The first prompt of a file, of which only the start is read if it has lines. Raises as `prompts`."""
        columns = columns or Columns()
        is_folder = not is_remote(place) and self.places.path(place).is_dir()
        form = "arrow" if is_folder or is_dataset(place) else format_of(place, columns)
        if form in ("text", "jsonl", "csv"):
            head = self._prompt_bytes(place, FIRST_BYTES)
            if (found := first_prompt(head, place, columns, form)) is not None:
                return found
        return self.prompts(place, columns)[0]

    def _dataset(self, place: str, columns: Columns) -> list[Prompt]:
        """Reads all files of a data set on the Hub as one."""
        self.places.check(place)
        try:
            files = self._tables.files_of(place)
        except OSError as error:
            raise _unread(place, error) from None
        prompts: list[Prompt] = []
        for file in files:
            prompts += self.prompts(file, columns)
            if len(prompts) > MAX_PROMPTS:
                raise ValueError(f"{place}: a data set has at most {MAX_PROMPTS} rows: name some of its files")
        return prompts

    def _folder(self, place: str) -> list[str]:
        """Arrow files of a folder that `Dataset.save_to_disk` made, in their order. Raises ValueError."""
        folder = place.rstrip("/")
        if self.places.exists(f"{folder}/dataset_dict.json"):
            raise ValueError(f"{place}: it holds several splits: name one, as in {folder}/train")
        if not self.places.exists(f"{folder}/state.json"):
            raise ValueError(f"{place}: not a folder that `datasets` saved: name one file, or save the data set again")
        names = saved_files(folder, self._prompt_bytes(f"{folder}/state.json", _STATE_BYTES))
        if sum(self._size(f"{folder}/{name}") for name in names) > MAX_PROMPT_BYTES:
            raise _too_large(place)
        return [f"{folder}/{name}" for name in names]

    def _rows(self, place: str, form: Format, columns: Columns) -> bytes:
        """A table as JSON lines."""
        self.places.check(place)
        ignored = sorted(columns.ignored)

        def read(source: int | str) -> bytes:
            return self._tables.read_rows(source, form, MAX_PROMPT_BYTES, ignored)

        try:
            return read(place) if is_remote(place) else self._opened(place, read)
        except OSError as error:
            raise _unread(place, error) from None
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None

    def _opened(self, place: str, read: Callable[[int], T]) -> T:
        descriptor = self.places.open(place)
        try:
            return read(descriptor)
        finally:
            os.close(descriptor)

    def _size(self, place: str) -> int:
        """Bytes of a file; 0 where it cannot be opened, which reading it tells."""
        try:
            return self._opened(place, lambda descriptor: os.fstat(descriptor).st_size)
        except OSError:
            return 0

    def _prompt_bytes(self, place: str, limit: int) -> bytes:
        try:
            return self.read(place, limit)
        except OSError as error:
            raise _unread(place, error) from None


def _too_large(place: str) -> ValueError:
    return ValueError(f"{place!r} is too large: a prompt file has at most {MAX_PROMPT_BYTES} bytes")


def _unread(place: str, error: OSError) -> ValueError:
    kind = Missing if isinstance(error, FileNotFoundError) else Unread
    return kind(f"{place}: prompts cannot be read: {error}")
