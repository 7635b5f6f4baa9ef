"""Positions in a Redis append-only file, and cutting it back to one: drills and tests make a power cut so.

Redis 6.2 appends to one file, `appendonly.aof`. Redis 7 has a folder, `appendonlydir`, whose manifest names a base and
the files that follow it; it appends to the last of them.
"""

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
    """Returns the end of the file that the server in `directory` appends to. Raises NotFound without such a file."""
    file = directory / _NAME
    manifest = directory / "appendonlydir" / f"{_NAME}.manifest"
    if manifest.is_file():
        named = [line.split()[1] for line in manifest.read_text().splitlines() if line.endswith("type i")]
        file = manifest.with_name(named[-1]) if named else manifest
    if not file.is_file() or file == manifest:
        raise NotFound(f"{directory} has no append-only file: start Redis with `appendonly yes`")
    return Position(file, file.stat().st_size)


def cut(directory: Path, earlier: Position) -> int:
    """Cuts off the bytes appended since, and returns their number. The server drops a last command that is cut in two.
    It must not write meanwhile. Raises NotFound if it has rewritten its file since."""
    now = position(directory)
    if now.file != earlier.file or now.size_bytes < earlier.size_bytes:
        raise NotFound(f"{earlier.file} was rewritten since: begin again from the position of now")
    os.truncate(now.file, earlier.size_bytes)
    return now.size_bytes - earlier.size_bytes
