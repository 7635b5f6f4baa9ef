"""Checkpoints that must not be loaded: renamed to `step-00000012.aside-TOKEN`, with `aside.json` in them that says why.

Only the newest `KEPT` of them stay, and they are the first to go when a checkpoint has no room.
"""

import json
import logging
import os
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowfleet.proto import trainer_pb2

KEPT = 2
_NOTE = "aside.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SetAside:
    """A checkpoint that was set aside."""

    at: float
    """Unix seconds; 0 where there was no room to note it."""
    path: Path
    reason: str

    @property
    def step(self) -> int:
        return int(self.path.name.partition(".")[0].removeprefix("step-"))

    def told(self) -> trainer_pb2.SetAside:
        """Returns the message that reports this checkpoint to the controller."""
        return trainer_pb2.SetAside(step=self.step, path=str(self.path), reason=self.reason)


def set_aside(path: Path, reason: str) -> Path:
    """Renames a checkpoint and notes why, by rank 0. Returns where it is now."""
    aside = path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}")
    with suppress(OSError):  # of a full disk, say: the log has it as well
        (path / _NOTE).write_text(json.dumps({"at": time.time(), "reason": reason}), encoding="utf-8")
    os.replace(path, aside)
    log.warning("checkpoint set aside as %s: %s", aside, reason)
    for old in kept_aside(path.parent)[:-KEPT]:
        shutil.rmtree(old.path, ignore_errors=True)
    return aside


def kept_aside(directory: Path) -> list[SetAside]:
    """Oldest first."""
    checkpoints = [_read(path) for path in directory.glob("step-*.aside-*")]
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.at, checkpoint.path))


def _read(path: Path) -> SetAside:
    note: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        note = json.loads((path / _NOTE).read_text(encoding="utf-8"))
    return SetAside(float(note.get("at", 0.0)), path, str(note.get("reason", "")))
