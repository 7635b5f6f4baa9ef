"""Data of a job that the controller cannot read, and that this machine has: uploaded, and named as uploads."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowfleet.client.types import SettingProblem

_PIECE = 1 << 20


class Pieces:
    """The bytes of a file, from its beginning each time that they are asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_uploads(
    job: Mapping[str, Any],
    refused: Sequence[SettingProblem],
    folders: Sequence[Path],
    upload: Callable[[Path], str],
) -> dict[str, Any] | None:
    """The job with uploads in place of the data files that the controller refused and one of `folders` has; None where
    there are none."""
    changed = copy.deepcopy(dict(job))
    settings = dict.fromkeys(problem.setting for problem in refused if problem.setting.startswith("data."))
    found = {setting: path for setting in settings if (path := _own(_value(changed, setting), folders)) is not None}
    for setting, path in found.items():
        *tables, name = setting.split(".")
        _value(changed, ".".join(tables))[name] = upload(path)
    return changed if found else None


def _own(written: Any, folders: Sequence[Path]) -> Path | None:
    if not isinstance(written, str) or "://" in written:
        return None
    return next((path for folder in folders if (path := folder / written).is_file()), None)


def _value(job: Any, setting: str) -> Any:
    """What a job holds at a dotted setting; None where there is nothing."""
    for name in setting.split("."):
        if isinstance(job, dict):
            job = job.get(name)
        elif isinstance(job, list) and name.isdecimal() and int(name) < len(job):
            job = job[int(name)]
        else:
            return None
    return job
