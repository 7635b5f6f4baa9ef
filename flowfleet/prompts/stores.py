"""Reads a data set on this machine with this process's own rights, for `flowfleet submit --check`."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import urlsplit

from flowfleet.process.service import is_loopback
from flowfleet.prompts import hub
from flowfleet.prompts.columns import Columns
from flowfleet.prompts.formats import format_of, parse_prompts
from flowfleet.prompts.prompt import Prompt
from flowfleet.prompts.tables import saved_files

MAX_FILE_BYTES = 1 << 30
"""Largest file of prompts."""


def read_prompts(source: str, columns: Columns) -> list[Prompt]:
    """Reads all prompts of a file, folder or URL. Raises ValueError with the mistake, or with the store's message."""
    try:
        prompts = list(_read(source, columns))
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error}") from None
    if not prompts:
        raise ValueError(f"{source}: holds no prompt")
    return prompts


def _read(source: str, columns: Columns) -> Iterator[Prompt]:
    if hub.is_dataset(source):
        for file in hub.files_of(source):
            yield from _read(file, columns)
    elif "://" not in source and (folder := Path(source)).is_dir():
        count = 0
        for name in saved_files(source.rstrip("/"), lambda name: _note(folder / name)):
            with (folder / name).open("rb") as table:
                for prompt in parse_prompts(table, f"{source.rstrip('/')}/", columns, "arrow", 1 + count):
                    count += 1
                    yield prompt
    else:
        form = format_of(source, columns)
        with _open(source) as opened:
            data = io.BytesIO(opened.read(MAX_FILE_BYTES + 1))
        if len(data.getbuffer()) > MAX_FILE_BYTES:
            raise ValueError(f"{source} is too large: a prompt file has at most {MAX_FILE_BYTES} bytes")
        yield from parse_prompts(data, source, columns, form)


def _note(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


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
