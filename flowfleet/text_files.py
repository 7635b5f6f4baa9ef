"""Text files that users write: UTF-8, with or without the byte order mark that Windows writes."""

import json
from pathlib import Path
from typing import Any

_OTHER_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")


def read_text(path: Path) -> str:
    """Returns the file's text. Raises OSError, and ValueError that names the file if it is not UTF-8."""
    try:
        return decoded(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def decoded(data: bytes) -> str:
    """Returns the text of a whole file. Raises ValueError for another encoding than UTF-8, with the line."""
    check_encoding(data[:4])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise ValueError(f"line {line} is not UTF-8: save the file as UTF-8") from None


def check_encoding(head: bytes) -> None:
    """Raises ValueError if a file that begins so is UTF-16, UTF-32 or binary."""
    if head.startswith(_OTHER_MARKS) or b"\0" in head[:4]:
        raise ValueError("the file is UTF-16 or no text: save it as UTF-8")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of these pairs. Raises ValueError for a key that it gives twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:100]!r} is given twice: leave one out")
    return fields


JSON = json.JSONDecoder(object_pairs_hook=unique)
"""Refuses objects that give a key twice."""
