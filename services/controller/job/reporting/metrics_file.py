"""`metrics.jsonl` in a job's folder: a line for each training step and for each validation, written once.

A line is appended whole and reaches the disk before the step counts as trained, so a controller that was killed in
between finds it and writes it no second time. A last line that a crash left incomplete is cut off.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from flowfleet.filesystem import writing

METRICS_FILE: Final = "metrics.jsonl"

Kind = Literal["step", "version"]
"""Subject of a line: a training step, or the policy version of a validation."""

log = logging.getLogger(__name__)


class MetricsFile:
    """The file of one job. A disk that cannot be written costs the file, not the job."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: set[tuple[str, int]] | None = None

    def append(self, kind: Kind, number: int, values: Mapping[str, float | None]) -> None:
        """Writes a line, unless the file has it. NaN and infinity become null."""
        try:
            if self._written is None:
                self._written = self._read()
            if (kind, number) not in self._written:
                self._write({kind: number, "time": datetime.now(UTC).isoformat(), **_finite(values)})
                self._written.add((kind, number))
        except OSError as error:
            self._written = None
            log.warning("metrics file: %s was not written: %s", self._path, error)

    def _read(self) -> set[tuple[str, int]]:
        """Returns what the file has, and cuts an incomplete last line."""
        found: set[tuple[str, int]] = set()
        if not self._path.exists():
            return found
        end = 0
        with self._path.open("rb+") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                found |= _about(line)
            file.truncate(end)
        return found

    def _write(self, row: Mapping[str, object]) -> None:
        with writing(self._path), self._path.open("ab") as file:
            file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _about(line: bytes) -> set[tuple[str, int]]:
    try:
        row = json.loads(line)
    except ValueError:  # edited by hand
        return set()
    return {(kind, row[kind]) for kind in ("step", "version") if isinstance(row, dict) and kind in row}


def _finite(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}
