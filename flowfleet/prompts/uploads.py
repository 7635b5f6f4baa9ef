"""Names of uploaded prompt files: `upload:SHA256/NAME`, by content, so that the same file has one name."""

import re
from pathlib import PurePath

from flowfleet.prompts.formats import SUFFIXES

SCHEME = "upload:"
DIGEST = r"[0-9a-f]{64}"
NAME = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,99}}\.(?:{'|'.join(suffix[1:] for suffix in SUFFIXES)})"
"""A plain file name with the suffix of a format that one file holds."""
_PLACE = re.compile(rf"{SCHEME}({DIGEST})/({NAME})")


def is_upload(name: str) -> bool:
    """Returns True if a place is meant as an upload."""
    return name.startswith(SCHEME)


def place_of(digest: str, name: str) -> str:
    return f"{SCHEME}{digest}/{name}"


def parts_of(name: str) -> tuple[str, str] | None:
    """Splits a name into digest and file name; None if it does not name an upload."""
    match = _PLACE.fullmatch(name)
    return None if match is None else (match[1], match[2])


def name_of(path: PurePath) -> str:
    """Returns the upload's name for a user's file. Raises ValueError for a suffix that prompt files do not have."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: only prompt files can be uploaded: give {', '.join(SUFFIXES)}")
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem).lstrip("._-")[:100] or "prompts"
    return f"{stem}{path.suffix.lower()}"
