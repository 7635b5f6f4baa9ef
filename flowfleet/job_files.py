"""From a job file to what is submitted: settings changed on the command line, paths found, defaults filled in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowfleet.jobs import JobSpec, parse_job, read_job_file
from flowfleet.setting_files import change_table

PATH_SETTINGS = (("model", "path"), ("data", "train"), ("data", "validation"))
"""Settings that name files."""


def prepare_job(path: Path, changes: Sequence[str] = (), *, same_machine: bool) -> JobSpec:
    """Reads a job file, applies `key=value` changes and validates it. Raises ValueError with what to change.

    Where the controller sees our files relative paths are made absolute: each is looked for in the current directory,
    then in the job file's directory and the directories above it, and the first that exists is taken. A path found
    nowhere, and every path for a stack elsewhere, goes as it is written and is read relative to the controller's
    directory.
    """
    data = read_job_file(path)
    for change in changes:
        change_table(data, change, "schedule.steps=20")
    if same_machine:
        for part, name in PATH_SETTINGS:
            _find(data, part, name, [Path.cwd(), *path.resolve().parents])
    return parse_job(data)


def _find(data: dict[str, Any], part: str, name: str, directories: Sequence[Path]) -> None:
    table = data.get(part)
    written = table.get(name) if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(written, str) or Path(written).is_absolute() or "://" in written:
        return
    found = next((directory / written for directory in directories if (directory / written).exists()), None)
    if found is not None:
        table[name] = str(found)
