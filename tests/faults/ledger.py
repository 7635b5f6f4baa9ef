"""What was done to the job, one line of JSON a fault, written as it happens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Entry:
    """One fault as it was done."""

    number: int
    kind: str
    target: str
    wished_phase: str
    what: str = ""
    at_s: float = 0.0
    """Seconds from the start of the run to the strike."""
    step: int = 0
    phase: str = ""
    """What the job was doing when it was struck."""
    counted: bool = False
    """It hit a live target of a job that had not ended."""
    recovery_s: float | None = None
    """Seconds from the strike until the job had finished another step."""
    replaced_s: float | None = None
    """Seconds until a process that hung for good was replaced."""
    resumed: str = ""
    """Why the job was paused, where it was resumed by hand."""
    failures: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


class Ledger:
    """All entries, in memory and in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: list[Entry] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    @property
    def num_counted(self) -> int:
        return sum(entry.counted for entry in self.entries)
