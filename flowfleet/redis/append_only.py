"""The end of a Redis' append-only file, and what it was earlier: a power cut as drills and tests make one.

Redis 6.2 appends to one file, `appendonly.aof`. Redis 7 has a folder, `appendonlydir`, whose manifest names a base and
the files that follow it; it appends to the last of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flowfleet.errors import NotFound

_NAME = "appendonly.aof"


@dataclass(frozen=True)
class Position:
    """How far a server had written."""

    file: Path
    size_bytes: int


def position(directory: Path) -> Position:
    """The end of what the server that keeps its data in `directory` appends to. Raises NotFound without such a file."""
    file = directory / _NAME
    manifest = directory / "appendonlydir" / f"{_NAME}.manifest"
    if manifest.is_file():
        named = [line.split()[1] for line in manifest.read_text().splitlines() if line.endswith("type i")]
        file = manifest.with_name(named[-1]) if named else manifest
    if not file.is_file() or file == manifest:
        raise NotFound(f"{directory} has no append-only file: start Redis with `appendonly yes`")
    return Position(file, file.stat().st_size)


def cut(directory: Path, earlier: Position) -> int:
    """Takes off what was appended since, and returns its bytes; a last command that is cut in two is dropped by the
    server. It must not write meanwhile. Raises NotFound where it has rewritten its file since."""
    now = position(directory)
    if now.file != earlier.file or now.size_bytes < earlier.size_bytes:
        raise NotFound(f"{earlier.file} was rewritten since: begin again from the position of now")
    os.truncate(now.file, earlier.size_bytes)
    return now.size_bytes - earlier.size_bytes
