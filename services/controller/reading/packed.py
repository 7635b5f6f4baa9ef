"""Prompts of a data set in a file without a name: none of them is in the controller's memory until it is asked for.

The controller makes the file, and the reader (process.py) appends to it what it read. At 8·i lies where row i begins,
behind `ROWS_AT` lie the rows as JSON. The lowest bit of the entry behind a row's own says whether the row is more than
text and metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

from flowfleet.filesystem import writing
from flowfleet.prompts.formats import MAX_PROMPTS
from flowfleet.prompts.prompt import Prompt

ROWS_AT = 8 * (MAX_PROMPTS + 1)
_ENTRIES = 1 << 17
"""Entries that are read or written at once."""
_DIGESTED = 1 << 6
"""Prompts that are hashed at once."""
_FORMAT = "1"
"""Begins each digest, and is raised when the same prompts get another."""


class Packer:
    """Appends prompts to the file, which holds `count` of them in `size_bytes`."""

    def __init__(self, descriptor: int, count: int, size_bytes: int, limit_bytes: int) -> None:
        self.count, self.size_bytes = count, size_bytes
        self._descriptor, self._limit_bytes = descriptor, limit_bytes
        self._entries, self._rows = array("Q"), bytearray()

    def add(self, prompt: Prompt, file: int, line: int) -> None:
        """`file`: number of the file that the prompt is of. Raises ValueError for too many prompts or bytes."""
        row: list[Any] = [prompt.text, prompt.metadata, prompt.images, prompt.media, prompt.negative]
        row += [*([prompt.size] if prompt.size else []), file, line]
        self._rows += json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()
        size_bytes = self.size_bytes + len(self._rows)
        if size_bytes > self._limit_bytes or self.count + len(self._entries) == MAX_PROMPTS:
            raise ValueError(
                f"a data set has at most {MAX_PROMPTS} rows and {self._limit_bytes} bytes of prompts and metadata: "
                "leave rows out, or columns by data.ignore_columns"
            )
        is_more = bool(prompt.images or prompt.media or prompt.size or prompt.negative is not None)
        self._entries.append(size_bytes << 1 | is_more)
        if len(self._entries) == _ENTRIES or len(self._rows) > 8 * _ENTRIES:
            self.flush()

    def flush(self) -> None:
        """Writes what was added. Raises OSError."""
        with writing(Path("the controller's state directory")):  # the file has no name
            _write(self._descriptor, self._rows, ROWS_AT + self.size_bytes)
            _write(self._descriptor, self._entries.tobytes(), 8 * (self.count + 1))
        self.count, self.size_bytes = self.count + len(self._entries), self.size_bytes + len(self._rows)
        self._entries, self._rows = array("Q"), bytearray()


class Prompts(Sequence[Prompt]):
    """Prompts in the order of their files. `folder`: where the file without a name lies."""

    def __init__(self, folder: Path | None, origin: str) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, closed by `close`
        self._origin = origin
        self.files: list[str] = []
        """Names of the files, as messages show them."""
        self.num_prompts = 0
        self.size_bytes = 0

    @property
    def descriptor(self) -> int:
        """The file's. Raises ValueError once it is closed."""
        return self._file.fileno()

    def close(self) -> None:
        """Gives the file's space back."""
        self._file.close()

    def __len__(self) -> int:
        return self.num_prompts

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self.num_prompts))]
        begin, end = (entry >> 1 for entry in self._entries(range(self.num_prompts)[index], 2))
        text, metadata, images, media, negative, *sizes, file, line = json.loads(
            os.pread(self.descriptor, end - begin, ROWS_AT + begin)
        )
        source = f"{self.files[file]}:{line}"
        size = (sizes[0][0], sizes[0][1]) if sizes else None
        return Prompt(text, metadata, tuple(images), tuple(media), negative, self._origin, source, size)

    def telling(self, most: int) -> Iterator[Prompt]:
        """The prompts that are more than text and metadata, and the first `most` of the others, which no check of a job
        tells apart."""
        for start in range(0, self.num_prompts, _ENTRIES):
            for number, entry in enumerate(self._entries(start + 1, min(_ENTRIES, self.num_prompts - start)), start):
                if entry & 1 or most > 0:
                    most -= not entry & 1
                    yield self[number]

    def digest(self) -> str:
        """Fingerprint (flowfleet/job/fingerprints.py) of the prompts in their order, wherever each comes from."""
        found = hashlib.sha256()
        for start in range(0, self.num_prompts, _DIGESTED):
            places = [entry >> 1 for entry in self._entries(start, min(_DIGESTED, self.num_prompts - start) + 1)]
            rows = os.pread(self.descriptor, places[-1] - places[0], ROWS_AT + places[0])
            for begin, end in pairwise(places):
                prompt, _file, _line = rows[begin - places[0] : end - places[0]].rsplit(b",", 2)
                found.update(prompt)
        return f"{_FORMAT}:{found.hexdigest()}"

    def _entries(self, first: int, count: int) -> array[int]:
        return array("Q", os.pread(self.descriptor, 8 * count, 8 * first))


def _write(descriptor: int, data: bytes | bytearray, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written
