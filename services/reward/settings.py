"""The settings of a scorer, as the service's flags give them: a file, and changes on the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowfleet.job.setting_files import change_table, read_table


def read_settings(path: Path | None, changes: Sequence[str]) -> dict[str, Any]:
    """Reads the `--settings` file, then applies each `--set key=value`. Raises ValueError that says what to change."""
    settings = read_table(path, "a settings") if path is not None else {}
    for change in changes:
        change_table(settings, change, "timeout_s=20")
    return settings
