"""Place of a follower: the run that it writes, and how far it is. A small file, replaced whole after each event."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel

from flowfleet.filesystem import writing


class State(BaseModel):
    """Progress of a job's copy in the tracker."""

    run: str = ""
    """Name of the run in the tracker; empty before the first."""
    event: str = ""
    """Last event that was taken."""
    step: int = -1
    """Last training step that was taken."""
    version: int = -1
    """Last validation that was taken."""
    records: int = 0
    """Steps and validations that were taken: a number for the next one that is never given twice."""


class Place:
    """The file of one job in one tracker."""

    def __init__(self, folder: Path, job_id: str) -> None:
        self._path = folder / f"{job_id}.json"

    def read(self) -> State:
        """Reads the state; a fresh one if there is no file."""
        if not self._path.exists():
            return State()
        return State.model_validate_json(self._path.read_text())

    def write(self, state: State) -> None:
        """Replaces the file; a crash leaves the old one or the new one."""
        new = self._path.with_suffix(".new")
        with writing(new), new.open("w") as file:
            file.write(state.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other followers out. ValueError where there is one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"another follower writes this run ({self._path}): stop it first") from None
            yield
