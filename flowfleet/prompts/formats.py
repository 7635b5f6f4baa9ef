"""Files of prompts by their suffix, in any case: text, JSON lines, JSON, CSV, Parquet and Arrow.

Parquet and Arrow become JSON lines first (tables.py), in a process of its own where strangers name the file.
"""

from __future__ import annotations

import csv
import gc
import io
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any, Literal
from urllib.parse import urlsplit

from flowfleet.limits import MAX_METADATA_BYTES
from flowfleet.prompts.columns import LISTS, Columns, read_row
from flowfleet.prompts.prompt import Prompt, checked

Format = Literal["text", "jsonl", "json", "csv", "parquet", "arrow"]
SUFFIXES: dict[str, Format] = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".json": "json",
    ".parquet": "parquet",
}
MAX_PROMPTS = 4_000_000
"""Lines of a data set, each of which takes some 300 bytes of memory however short it is."""
MAX_JSON_PARTS = 20_000_000
"""Objects, lists and members of a .json file, which are all in memory at once."""
MANY = 100_000
"""Lines from which on a data set would hold up the garbage collector."""
_BREAKS = tuple(map(str.encode, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"))
"""Where `str.splitlines` begins a line."""

csv.field_size_limit(2 * MAX_METADATA_BYTES)


def format_of(source: str, columns: Columns) -> Format:
    """Format of a path or URL by its suffix. Raises ValueError for an unknown suffix, and for preferences in text."""
    path = urlsplit(source).path if source.startswith(("http://", "https://")) else source
    suffix = PurePath(path).suffix.lower()
    if suffix not in SUFFIXES:
        told = f"ends in {suffix}" if suffix else "has no suffix"
        raise ValueError(
            f"{source}: it {told}, which is no format of prompts: give {', '.join(SUFFIXES)} or a folder that "
            "`datasets` saved"
        )
    if columns.kind == "preferences" and suffix == ".txt":
        rest = ", ".join(known for known in SUFFIXES if known != suffix)
        raise ValueError(f"{source}: preferences have columns, and text has none: give {rest}")
    return SUFFIXES[suffix]


def parse_prompts(data: bytes, source: str, columns: Columns | None = None, form: Format | None = None) -> list[Prompt]:
    """Reads all prompts of a file. `form`: the data's format, where the suffix does not tell it.

    Raises ValueError that names the file and the line or row that is wrong.
    """
    columns = columns or Columns()
    form = form or format_of(source, columns)
    with _uncollected(data.count(b"\n")):
        prompts = list(_prompts(_decoded(data, source), source, columns, form))
    if not prompts:
        raise ValueError(f"{source}: holds no prompt")
    return prompts


def first_prompt(head: bytes, source: str, columns: Columns, form: Format) -> Prompt | None:
    """The first prompt of a file of lines, by its beginning."""
    return next(_prompts(head.decode("utf-8-sig", errors="ignore"), source, columns, form), None)


def _decoded(data: bytes, source: str) -> str:
    if sum(map(data.count, _BREAKS)) > MAX_PROMPTS:
        raise _too_many(source)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: prompts cannot be read: {error}; save the file as UTF-8") from None


def _prompts(text: str, source: str, columns: Columns, form: Format) -> Iterator[Prompt]:
    if form == "text":
        return (
            _line(line.strip(), f"{source}:{n}", columns) for n, line in enumerate(text.splitlines(), 1) if line.strip()
        )
    rows = {"csv": _csv_rows, "json": _json_rows}.get(form, _json_lines)(text, source, columns)
    numbered = itertools.islice(rows, MAX_PROMPTS + 1)
    return (read_row(row, source, number, columns) for number, row in _limited(numbered, source))


def _limited(rows: Iterator[tuple[int, Any]], source: str) -> Iterator[tuple[int, Any]]:
    for count, row in enumerate(rows):
        if count == MAX_PROMPTS:
            raise _too_many(source)
        yield row


def _too_many(source: str) -> ValueError:
    return ValueError(f"{source}: a prompt file has at most {MAX_PROMPTS} lines: leave some out")


def _line(line: str, where: str, columns: Columns) -> Prompt:
    try:
        return checked(Prompt(line, origin=columns.origin, source=where))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


# -- rows: each with the number of its line or its own ---------------------------------------------------------------


def _json_lines(text: str, source: str, columns: Columns) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, _json(line, f"{source}:{number}", columns.expected())


def _json_rows(text: str, source: str, columns: Columns) -> Iterator[tuple[int, Any]]:
    if sum(map(text.count, "{[,")) > MAX_JSON_PARTS:
        raise ValueError(f"{source}: it has more than {MAX_JSON_PARTS} parts: give .jsonl, which is read line by line")
    expected = "expected a list of objects, or of texts"
    rows = _json(text, source, expected)
    if not isinstance(rows, list):
        raise ValueError(f"{source}: {expected}")
    yield from enumerate(({columns.prompt: row} if isinstance(row, str) else row for row in rows), 1)


def _json(text: str, where: str, expected: str) -> Any:
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError:
        raise ValueError(f"{where}: {expected}") from None
    except RecursionError:
        raise ValueError(f"{where}: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if "\\u" in text:
        _check_characters(value, where)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Raises ValueError for a key that it gives twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice: leave one out")
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _check_characters(value: Any, where: str) -> None:
    """Raises ValueError for characters that JSON can escape but a message cannot hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: holds half of a surrogate pair, which is no character") from None


def _csv_rows(text: str, source: str, columns: Columns) -> Iterator[tuple[int, Any]]:
    """An empty cell is None. Paths and `metadata` are JSON in their cells; of one file its path is enough."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(header) == 1 and {";", "\t"} & set(header[0]):
            raise ValueError(f"the header is one cell, {header[0]!r}: separate cells by commas")
        if len(set(header)) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise ValueError(f"the header names {twice!r} twice: rename one of them")
        for cells in reader:
            if not any(cells):
                continue
            if len(cells) != len(header):
                raise ValueError(
                    f"it has {len(cells)} cells, the header has {len(header)}: quote cells with commas, and separate "
                    "cells by commas"
                )
            yield reader.line_num, {name: _cell(name, cell) for name, cell in zip(header, cells, strict=True)}
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{source}:{max(1, reader.line_num)}: {error}") from None


def _cell(name: str, cell: str) -> Any:
    if not cell:
        return None
    if name == "metadata" or (name in LISTS and cell.lstrip().startswith("[")):
        try:
            return _DECODER.decode(cell)
        except (json.JSONDecodeError, RecursionError):
            raise ValueError(f"its {name} are no JSON: {cell[:80]!r}") from None
    return [cell] if name in LISTS else cell


@contextmanager
def _uncollected(number: int) -> Iterator[None]:
    """Keeps the garbage collector from scanning very many lines again and again: each scan stops all threads."""
    if number < MANY:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
