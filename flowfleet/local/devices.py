"""Whose the accelerators of this machine are: of which job's trainer, which rollout pool or which reward. On CPUs jobs
have places instead.

The table is a file, so that it outlives all processes: a job keeps its devices until it ends, or has been paused for a
while. The controller writes jobs, the supervisor and `flowfleet pools` write the others, each under the file's lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from flowfleet.local.files import Watched, open_own, read_own, write_atomically

DEVICES_FILE, DEVICES_LOCK = "devices.json", "devices.lock"
ADDED = "trainers +"
"""Owner that stands for trainers of all jobs: of devices that they got while the stack ran."""

log = logging.getLogger(__name__)

Table = dict[str, tuple[str, ...]]


def pool_owner(name: str) -> str:
    """Owner that stands for a pool. Ids of jobs have no space."""
    return f"pool {name}"


class Devices:
    """`names`: of all devices that trainers may have, or of the places of a machine without accelerators."""

    def __init__(self, file: Path, names: Sequence[str] = ()) -> None:
        self._file, self._all = Watched(file), tuple(names)
        self._table: Table = {}

    @property
    def table(self) -> Mapping[str, tuple[str, ...]]:
        """Owner → its devices."""
        if self._file.has_changed():
            self._table = _read(self._file.path)
        return self._table

    @property
    def of(self) -> Mapping[str, tuple[str, ...]]:
        """Job → its devices."""
        table, names = self.table, set(self.names)
        return {owner: devices for owner, devices in table.items() if " " not in owner and names.issuperset(devices)}

    @property
    def num_taken(self) -> int:
        """Number of devices or places that jobs have."""
        return sum(len(devices) for owner, devices in self.table.items() if " " not in owner)

    @property
    def names(self) -> tuple[str, ...]:
        """Devices that trainers may have now."""
        lent = {name for owner, names in self.table.items() if " " in owner and owner != ADDED for name in names}
        return tuple(name for name in dict.fromkeys((*self._all, *self.table.get(ADDED, ()))) if name not in lent)

    def take(self, job_id: str, count: int) -> str:
        """Gives a job `count` devices, all of them where there are not so many. Returns "", or why it has none, in
        words that follow "waits for"."""
        with self.changing() as table:
            of, names = self.of, self.names
            if job_id in of:
                return ""
            taken = {name for devices in of.values() for name in devices}
            free = [name for name in names if name not in taken]
            count = max(1, min(count, len(names)))
            if len(free) < count:
                return f"{count} of the {len(names)} places of trainers on this machine"
            table[job_id] = tuple(free[:count])
        return ""

    def leave(self, job_id: str) -> None:
        with self.changing() as table:
            table.pop(job_id, None)

    def keep_only(self, job_ids: Collection[str]) -> None:
        with self.changing() as table:
            for job_id in [owner for owner in table if " " not in owner and owner not in job_ids]:
                del table[job_id]

    def release(self, owner: str) -> None:
        """Gives devices back: to trainers, unless the operator chose the trainers' devices."""
        with self.changing() as table:
            devices = table.pop(owner, ())
            if ADDED in table:
                table[ADDED] = tuple(dict.fromkeys((*table[ADDED], *devices)))

    def begin(self, lent: Mapping[str, Collection[str]], *, trainers_take_more: bool) -> None:
        """The table of a stack that starts: whose devices are not for trainers, and of jobs those that still are."""
        others = {name for devices in lent.values() for name in devices}
        with self.changing() as table:
            kept = {job: had for job, had in table.items() if " " not in job and others.isdisjoint(had)}
            table.clear()
            table.update(kept, **{owner: tuple(devices) for owner, devices in lent.items() if devices})
            table.update({ADDED: ()} if trainers_take_more else {})

    @contextlib.contextmanager
    def changing(self) -> Iterator[Table]:
        """The table, to be changed by this process alone. It is durable before anybody acts on it."""
        file = self._file.path
        file.parent.mkdir(parents=True, exist_ok=True)
        with open_own(file.with_name(DEVICES_LOCK), os.O_RDWR | os.O_CREAT) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            table = dict(self.table)
            yield table
            if table != self.table:
                write_atomically(file, json.dumps(table))


def _read(file: Path) -> Table:
    try:
        return {str(owner): tuple(devices) for owner, devices in json.loads(read_own(file)).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("could not read %s: trainers that run keep theirs, new ones may share them: %s", file, error)
        return {}
