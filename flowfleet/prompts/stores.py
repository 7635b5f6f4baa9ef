"""Reads a data set from where this process runs, with its own rights: what `flowfleet submit --check` asks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO, cast

from flowfleet.prompts import hub
from flowfleet.prompts.columns import Columns
from flowfleet.prompts.formats import format_of, parse_prompts
from flowfleet.prompts.prompt import Prompt
from flowfleet.prompts.tables import rows_as_json_lines, saved_files

MAX_FILE_BYTES = 1 << 30
"""Largest file of prompts."""


def read_prompts(place: str, columns: Columns) -> list[Prompt]:
    """Reads all prompts of a file, folder or URL. Raises ValueError with the mistake, or with the store's message."""
    try:
        return _read(place, columns)
    except OSError as error:
        raise ValueError(f"{place}: cannot be read: {error}") from None


def _read(place: str, columns: Columns) -> list[Prompt]:
    if hub.is_dataset(place):
        return [prompt for file in hub.files_of(place) for prompt in _read(file, columns)]
    if "://" not in place and (folder := Path(place)).is_dir():
        names = saved_files(place, (folder / "state.json").read_bytes())
        rows = b"".join(
            rows_as_json_lines(
                io.BytesIO((folder / name).read_bytes()), "arrow", MAX_FILE_BYTES, sorted(columns.ignored)
            )
            for name in names
        )
        return parse_prompts(rows, f"{place}/", columns, "jsonl")
    form = format_of(place, columns)
    with _open(place) as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{place} is too large: a prompt file has at most {MAX_FILE_BYTES} bytes")
    if form in ("parquet", "arrow"):
        data, form = rows_as_json_lines(io.BytesIO(data), "parquet", MAX_FILE_BYTES, sorted(columns.ignored)), "jsonl"
    return parse_prompts(data, place, columns, form)


def _open(place: str) -> BinaryIO:
    if place.startswith(hub.SCHEME):
        return hub.open_file(place)
    if place.startswith(("http://", "https://")):
        return _download(place)
    if "://" not in place:
        return Path(place).open("rb")
    try:
        import fsspec

        return cast(BinaryIO, fsspec.open(place, "rb").open())
    except ImportError as error:
        raise ValueError(f"{place}: {error}") from None


def _download(url: str) -> BinaryIO:
    import httpx

    try:
        response = httpx.get(url, follow_redirects=True, timeout=60.0).raise_for_status()
    except httpx.HTTPError as error:
        raise ValueError(f"{url}: cannot be read: {error}") from None
    return io.BytesIO(response.content)
