"""Data of a job that the controller cannot read, and that this machine has: uploaded, and named as uploads."""

import copy
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowfleet.api.problems import SettingProblem

_PIECE = 1 << 20


class Pieces:
    """The bytes of a file, from its beginning each time that they are asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._path.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_to_upload(
    job: Mapping[str, Any], refused: Sequence[SettingProblem], folders: Sequence[Path]
) -> dict[str, Path]:
    """Setting to file, of the data files that the controller refused and one of `folders` has."""
    settings = dict.fromkeys(problem.setting for problem in refused if problem.setting.startswith("data."))
    return {setting: path for setting in settings if (path := _own(value_at(dict(job), setting), folders)) is not None}


def with_places(job: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    """The job with other places of data, by setting."""
    changed = copy.deepcopy(dict(job))
    for setting, place in places.items():
        *tables, name = setting.split(".")
        value_at(changed, ".".join(tables))[name] = place
    return changed


def _own(written: Any, folders: Sequence[Path]) -> Path | None:
    if not isinstance(written, str) or "://" in written:
        return None
    return next((path for folder in folders if (path := folder / written).is_file()), None)


def value_at(job: Any, setting: str) -> Any:
    """Returns a job's value at a dotted setting; None where there is nothing."""
    for name in setting.split("."):
        if isinstance(job, dict):
            job = job.get(name)
        elif isinstance(job, list) and name.isdecimal() and int(name) < len(job):
            job = job[int(name)]
        else:
            return None
    return job
