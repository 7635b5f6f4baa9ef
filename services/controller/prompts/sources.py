"""Reads what a job's data name, where the operator lets it (places.py), by a process without secrets (reader.py)."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import TypeVar

from flowfleet.media.files import PICTURE_TYPES
from flowfleet.prompts.columns import Columns
from flowfleet.prompts.formats import Format, format_of
from flowfleet.prompts.hub import is_dataset
from flowfleet.prompts.prompt import Prompt
from flowfleet.prompts.tables import saved_files
from services.controller.reading.packed import Prompts
from services.controller.reading.places import Places, is_remote
from services.controller.reading.reader import Reader

MAX_PROMPT_BYTES = 1 << 30
_NOTE_BYTES = 1 << 20
_TABLES = ("parquet", "arrow")

T = TypeVar("T")


class Unread(ValueError):
    """The file or host did not answer as it should; the next try may succeed."""


class Missing(ValueError):
    """There is no such file, now."""


class Sources:
    """Blocking. `networks` are those that hosts may be in, besides public ones."""

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

    def prompts(self, place: str, columns: Columns | None = None, *, most: int | None = None) -> Prompts:
        """Reads all prompts of a file or data set, or the first `most` at least; the caller closes them.

        Raises ValueError as `parse_prompts`, also for a missing file, and Unread for one that is unreadable now.
        """
        columns = columns or Columns()
        found = Prompts(self.places.state_dir, columns.origin)
        try:
            for file, shown, form in self._files(place, columns):
                self._read_into(found, file, shown, form, columns, most)
                if most is not None and len(found) >= most:
                    break
            if not found:
                raise ValueError(f"{place}: holds no prompt")
        except BaseException:
            found.close()
            raise
        return found

    def first_prompt(self, place: str, columns: Columns | None = None) -> Prompt:
        """The first prompt of a data set. Raises as `prompts`."""
        with closing(self.prompts(place, columns, most=1)) as found:
            return found[0]

    def _files(self, place: str, columns: Columns) -> Iterator[tuple[str, str, Format]]:
        """Files of a data set: place, name in messages, format."""
        self.places.check(place)
        if is_dataset(place):
            try:
                files = self._tables.files_of(place)
            except OSError as error:
                raise _unread(place, error) from None
            yield from ((file, file, format_of(file, columns)) for file in files)
        elif not is_remote(place) and self.places.path(place).is_dir():
            folder = place.rstrip("/")
            names = saved_files(folder, lambda name: self._note(f"{folder}/{name}"))
            yield from ((f"{folder}/{name}", f"{folder}/", "arrow") for name in names)
        else:
            yield place, place, format_of(place, columns)

    def _read_into(
        self, found: Prompts, file: str, shown: str, form: Format, columns: Columns, most: int | None
    ) -> None:
        """Appends the prompts of a file. Rows of files with one name in messages are numbered on."""
        self.places.check(file)
        first = 1 + len(found) if shown in found.files else 1
        if shown not in found.files:
            found.files.append(shown)
        question = {
            "place": shown,
            "file": found.files.index(shown),
            "format": form,
            "columns": {**asdict(columns), "ignored": sorted(columns.ignored)},
            "first": first,
            "most": most,
            "count": len(found),
            "size": found.size_bytes,
            "limit": MAX_PROMPT_BYTES,
        }
        reader = self._tables if form in _TABLES else self.reader

        def read(source: int | str) -> tuple[int, int]:
            if isinstance(source, int) and os.fstat(source).st_size > MAX_PROMPT_BYTES:  # weights, say: not read at all
                raise ValueError(f"{file!r} is too large: a prompt file has at most {MAX_PROMPT_BYTES} bytes")
            return reader.read_prompts(question, found.descriptor, source)

        try:
            found.num_prompts, found.size_bytes = read(file) if is_remote(file) else self._opened(file, read)
        except OSError as error:
            raise _unread(file, error) from None

    def _opened(self, place: str, read: Callable[[int], T]) -> T:
        descriptor = self.places.open(place)
        try:
            return read(descriptor)
        finally:
            os.close(descriptor)

    def _note(self, place: str) -> bytes | None:
        """The beginning of a small file, None where there is none."""
        try:
            return self.read(place, _NOTE_BYTES) if self.places.exists(place) else None
        except OSError as error:
            raise _unread(place, error) from None


def _unread(place: str, error: OSError) -> ValueError:
    kind = Missing if isinstance(error, FileNotFoundError) else Unread
    return kind(f"{place}: prompts cannot be read: {error}")
