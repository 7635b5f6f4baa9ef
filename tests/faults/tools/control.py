"""What the reward of a chaos stack does wrong, as a file that the injector writes and the reward reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flowfleet.local.files import write_atomically


@dataclass(frozen=True)
class Control:
    """No poison and no mode: every sample gets its score at once."""

    poison: Mapping[str, str] = field(default_factory=dict)
    """step/group/index → one of `schedule.POISONS`, for good."""
    mode: str = ""
    """Answer to all calls while set: "slow", "hang", "unavailable" or "rubbish"."""

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps({"poison": dict(self.poison), "mode": self.mode}))

    @classmethod
    def read(cls, path: Path) -> Control:
        """The file's content; without a file, nothing goes wrong."""
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        return cls(data["poison"], data["mode"])
