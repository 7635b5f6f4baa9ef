"""Reads a data set on this machine with this process's own rights, for `flowfleet submit --check`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import urlsplit

from flowfleet.process.service import is_loopback
from flowfleet.prompts import hub
from flowfleet.prompts.columns import Columns
from flowfleet.prompts.formats import format_of, parse_prompts
from flowfleet.prompts.prompt import Prompt
from flowfleet.prompts.tables import rows_as_json_lines, saved_files

MAX_FILE_BYTES = 1 << 30
"""Largest file of prompts."""


def read_prompts(source: str, columns: Columns) -> list[Prompt]:
    """Reads all prompts of a file, folder or URL. Raises ValueError with the mistake, or with the store's message."""
    try:
        return _read(source, columns)
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error}") from None


def _read(source: str, columns: Columns) -> list[Prompt]:
    if hub.is_dataset(source):
        return [prompt for file in hub.files_of(source) for prompt in _read(file, columns)]
    if "://" not in source and (folder := Path(source)).is_dir():
        names = saved_files(source, (folder / "state.json").read_bytes())
        rows = b"".join(
            rows_as_json_lines(
                io.BytesIO((folder / name).read_bytes()), "arrow", MAX_FILE_BYTES, sorted(columns.ignored)
            )
            for name in names
        )
        return parse_prompts(rows, f"{source}/", columns, "jsonl")
    form = format_of(source, columns)
    with _open(source) as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{source} is too large: a prompt file has at most {MAX_FILE_BYTES} bytes")
    if form in ("parquet", "arrow"):
        data, form = rows_as_json_lines(io.BytesIO(data), "parquet", MAX_FILE_BYTES, sorted(columns.ignored)), "jsonl"
    return parse_prompts(data, source, columns, form)


def _open(source: str) -> BinaryIO:
    if source.startswith(hub.SCHEME):
        return hub.open_file(source)
    if source.startswith(("http://", "https://")):
        return _download(source)
    if "://" not in source:
        return Path(source).open("rb")
    try:
        import fsspec

        return cast(BinaryIO, fsspec.open(source, "rb").open())
    except ImportError as error:
        raise ValueError(f"{source}: {error}") from None


def _download(url: str) -> BinaryIO:
    import httpx

    try:
        by_proxy = not is_loopback(urlsplit(url).hostname or "")
        response = httpx.get(url, follow_redirects=True, timeout=60.0, trust_env=by_proxy).raise_for_status()
    except httpx.HTTPError as error:
        raise ValueError(f"{url}: cannot be read: {error}") from None
    return io.BytesIO(response.content)
