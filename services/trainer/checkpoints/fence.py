"""Fence between the trainers of a job: a file in the directory of its checkpoints, which all of them share.

Each trainer takes a number when it is configured, larger than any before. A trainer that was given up, stopped or cut
off may wake while its successor runs. Its number is then not the newest: it completes no checkpoint and no export,
replicas refuse its weights (services/rollout/weights/state.py), and it exits.

It may also sleep between its last check and the action after it. So an action only ever moves the trainer's own folder,
or moves something into it: the next trainer takes these folders away before it reads anything else.
"""

import os
import shutil
import time
from pathlib import Path

NAME = "attempt"
_PREVIOUS = ".previous"


class Replaced(Exception):
    """A later trainer of the job has started. No FlowfleetError: the process that meets it ends."""


class Fence:
    """Fence of one trainer; rank 0 takes the number and checks it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self.attempt = 0
        """This trainer's number; 0 before it was taken."""

    def take(self) -> int:
        """Makes this trainer the current one. The number is a time, so that it is the larger one also where the file
        was lost, and above the last one, so that a clock which went back does no harm."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.attempt = max(self._newest() + 1, time.time_ns())
        aside = self._path.with_name(f".{NAME}.{self.attempt}")
        with aside.open("w", encoding="ascii") as file:
            file.write(str(self.attempt))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self._path)
        return self.attempt

    def check(self) -> None:
        """Raises Replaced."""
        if self.attempt and (newest := self._newest()) > self.attempt:
            raise Replaced(f"trainer {newest} replaced trainer {self.attempt} of this job")

    def put(self, aside: Path, path: Path) -> None:
        """Renames a folder that was written aside, replacing the one of that name. Raises Replaced, and then changes
        nothing."""
        self.check()
        try:
            if path.exists():
                os.rename(path, aside / _PREVIOUS)
                shutil.rmtree(aside / _PREVIOUS)
            os.rename(aside, path)
        except OSError:
            self.check()
            raise

    def _newest(self) -> int:
        try:
            return int(self._path.read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return 0
