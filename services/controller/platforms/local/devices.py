"""Which accelerators of this machine the trainer of which job has; on CPUs, which of a number of places.

The table is a file, so that it outlives the controller and the trainers: a job keeps its devices until it ends, or has
been paused for a while.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from flowfleet.local.files import read_own, write_atomically

log = logging.getLogger(__name__)


class Devices:
    """`names`: of all devices, or of the places of a machine without."""

    def __init__(self, file: Path, names: Sequence[str]) -> None:
        self._file, self._names = file, tuple(names)
        self._of: dict[str, tuple[str, ...]] = {}
        try:
            stored = json.loads(read_own(file))
            self._of = {job_id: tuple(devices) for job_id, devices in stored.items() if set(devices) <= set(names)}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            log.warning("could not read %s: trainers that run keep theirs, new ones may share them: %s", file, error)

    @property
    def of(self) -> Mapping[str, tuple[str, ...]]:
        """Job → its devices."""
        return self._of

    @property
    def count(self) -> int:
        return len(self._names)

    def take(self, job_id: str, count: int) -> str:
        """Gives a job `count` devices, all of them where there are not so many. Returns "", or why it has none, in
        words that follow "waits for"."""
        if job_id in self._of:
            return ""
        taken = {name for devices in self._of.values() for name in devices}
        free = [name for name in self._names if name not in taken]
        count = min(count, len(self._names))
        if len(free) < count:
            return f"{count} of the {len(self._names)} places of trainers on this machine"
        self._put({**self._of, job_id: tuple(free[:count])})
        return ""

    def leave(self, job_id: str) -> None:
        if job_id in self._of:
            self._put({known: devices for known, devices in self._of.items() if known != job_id})

    def keep_only(self, job_ids: Collection[str]) -> None:
        if not set(self._of) <= set(job_ids):
            self._put({known: devices for known, devices in self._of.items() if known in job_ids})

    def _put(self, of: dict[str, tuple[str, ...]]) -> None:
        """Durable first: a job that knows its devices still has them after a crash."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps(of))
        self._of = of
