"""Files of prompts by their suffix, in any case: text, JSON lines, JSON, CSV, Parquet and Arrow (tables.py).

Files are read as streams: at most .json is in memory as a whole. Lines end at LF, CRLF or CR, in every format.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, BinaryIO, Literal
from urllib.parse import urlsplit

from flowfleet.limits import MAX_METADATA_BYTES
from flowfleet.prompts.columns import LISTS, Columns, read_row
from flowfleet.prompts.prompt import Prompt
from flowfleet.prompts.tables import MAX_ROWS, table_rows
from flowfleet.text_files import JSON, check_encoding, decoded

Format = Literal["text", "jsonl", "json", "csv", "parquet", "arrow"]
SUFFIXES: dict[str, Format] = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".json": "json",
    ".parquet": "parquet",
}
MAX_PROMPTS = MAX_ROWS
MAX_JSON_PARTS = 20_000_000
"""Objects, lists and members of a .json file, which are all in memory at once."""
MAX_LINE = 8 * MAX_METADATA_BYTES
"""Characters of a line: JSON may write each of the largest metadata as an escape of six."""

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


def parse_prompts(file: BinaryIO, source: str, columns: Columns, form: Format, first: int = 1) -> Iterator[Prompt]:
    """Reads the prompts of an open file one by one. `source`: the file in messages; `first`: number of its first row.

    Raises ValueError that names the file and the line or row that is wrong.
    """
    lines = _Lines(file)
    found: Iterator[tuple[int, Any]]
    if form == "parquet" or form == "arrow":
        found = enumerate(table_rows(file, form, columns.ignored), first)
    elif form == "json":
        found = enumerate(_json_rows(file, columns), first)
    else:
        found = {"text": _texts, "csv": _csv_rows, "jsonl": _json_lines}[form](lines, columns)
    for count, (number, row) in enumerate(_located(found, lines, source)):
        if count == MAX_PROMPTS:
            raise ValueError(f"{source}: a prompt file has at most {MAX_PROMPTS} rows: leave some out")
        yield read_row(row, source, number, columns)


def _located(rows: Iterator[tuple[int, Any]], lines: _Lines, source: str) -> Iterator[tuple[int, Any]]:
    """The rows. Raises ValueError that names the file, and the line of a file of lines."""
    while True:
        try:
            row = next(rows, None)
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{source}{f':{lines.number}' if lines.number else ''}: {error}") from None
        if row is None:
            return
        yield row


class _Lines:
    """Lines of a file with their ends, which csv needs in its cells. `number`: of the last one. Raises ValueError."""

    def __init__(self, file: BinaryIO) -> None:
        self.number = 0
        self._file = file

    def __iter__(self) -> Iterator[str]:
        text = io.TextIOWrapper(self._file, "utf-8-sig", errors="surrogateescape", newline="")
        while line := text.readline(MAX_LINE):
            self.number += 1
            if self.number == 1:
                check_encoding(line[:4].encode(errors="surrogateescape"))
            if len(line) == MAX_LINE:
                raise ValueError(f"the line has {MAX_LINE} characters or more: shorten it")
            try:
                line.encode()
            except UnicodeEncodeError:
                raise ValueError("the line is not UTF-8: save the file as UTF-8") from None
            yield line


# -- rows: each with the number of its line or its own ---------------------------------------------------------------


def _texts(lines: _Lines, columns: Columns) -> Iterator[tuple[int, Any]]:
    return ((lines.number, {columns.prompt: line.strip()}) for line in lines if line.strip())


def _json_lines(lines: _Lines, columns: Columns) -> Iterator[tuple[int, Any]]:
    return ((lines.number, _json(line, columns.expected())) for line in lines if line.strip())


def _json_rows(file: BinaryIO, columns: Columns) -> Iterator[Any]:
    data = file.read()
    if sum(map(data.count, (b"{", b"[", b","))) > MAX_JSON_PARTS:
        raise ValueError(f"it has more than {MAX_JSON_PARTS} parts: give .jsonl, which is read line by line")
    expected = "expected a list of objects, or of texts"
    rows = _json(decoded(data), expected)
    if not isinstance(rows, list):
        raise ValueError(expected)
    yield from ({columns.prompt: row} if isinstance(row, str) else row for row in rows)


def _json(text: str, expected: str) -> Any:
    try:
        value = JSON.decode(text)
    except json.JSONDecodeError:
        raise ValueError(expected) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\u" in text:
        _check_characters(value)
    return value


def _check_characters(value: Any) -> None:
    """Raises ValueError for characters that JSON can escape but a message cannot hold."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character") from None


def _csv_rows(lines: _Lines, columns: Columns) -> Iterator[tuple[int, Any]]:
    """An empty cell is None. Paths and `metadata` are JSON in their cells; of one file its path is enough.

    A space after a comma belongs to the cell (RFC 4180), unless the header has spaces there: who writes so by hand
    means none.
    """
    texts = iter(lines)
    header, is_spaced = _header(texts, columns)
    for cells in csv.reader(texts, strict=True, skipinitialspace=is_spaced):
        if not cells:
            continue
        if len(cells) != len(header):
            raise ValueError(
                f"it has {len(cells)} cells, the header has {len(header)}: quote cells with commas, and separate "
                "cells by commas"
            )
        yield lines.number, {name: _cell(name, cell) for name, cell in zip(header, cells, strict=True)}


def _header(lines: Iterator[str], columns: Columns) -> tuple[list[str], bool]:
    """Names of the columns, and whether spaces follow the commas between them. Raises ValueError."""
    read: list[str] = []

    def noted() -> Iterator[str]:
        for line in lines:
            read.append(line)
            yield line

    header = next(csv.reader(noted(), strict=True), [])
    is_spaced = any(name.startswith(" ") for name in header[1:])
    if is_spaced:
        header = next(csv.reader(read, strict=True, skipinitialspace=True))
    header = [name.strip() for name in header]
    if len(header) == 1 and {";", "\t", "|"} & set(header[0]):
        raise ValueError(f"the header is one cell, {header[0]!r}: separate cells by commas")
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise ValueError(f"the header names {twice!r} twice: rename one of them")
    if "" in set(header) - columns.ignored:
        raise ValueError(f"cell {1 + header.index('')} of the header is empty: name the column, or write none")
    return header, is_spaced


def _cell(name: str, cell: str) -> Any:
    if not cell:
        return None
    if cell[0].isspace() and cell.lstrip().startswith('"'):
        raise ValueError(f"a space precedes the quote of the cell {cell[:80]!r}: remove the space")
    if name == "metadata" or (name in LISTS and cell.lstrip().startswith("[")):
        try:
            return JSON.decode(cell)
        except (json.JSONDecodeError, RecursionError):
            raise ValueError(f"its {name} are no JSON: {cell[:80]!r}") from None
    return [cell] if name in LISTS else cell
