"""Files of jobs below the state directory: removes a job's, and measures how much there is. Blocking."""

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

log = logging.getLogger(__name__)

JOBS = "jobs"
_JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Folders:
    def __init__(self, state_dir: Path, registry: CollectorRegistry) -> None:
        self._root = state_dir.resolve()
        self._parts: set[str] = set()
        self._bytes = Gauge(
            "flowfleet_state_bytes", "Bytes on disk by entry of the state directory", ["part"], registry=registry
        )

    def job_ids(self) -> set[str]:
        """Jobs that have a folder, those of other fleets too. A folder of another name is no job's."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root / JOBS) as entries:
            return {one.name for one in entries if one.is_dir(follow_symlinks=False) and _JOB_ID.fullmatch(one.name)}
        return set()

    def remove(self, job_id: str) -> None:
        """Removes checkpoints, models, logs and all else that a job has left."""
        folder = self._root / JOBS / job_id
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            log.warning("keeper could not remove all of %s: give the controller the right to", folder)
        for pattern in (f"trainers/{job_id}.*", f"logs/trainer-{job_id}.log"):  # the second: of earlier releases
            for path in self._root.glob(pattern):
                path.unlink(missing_ok=True)

    def measure(self) -> None:
        """Sets the metric. A file with several names counts once."""
        seen: set[tuple[int, int]] = set()
        parts = [part for part in (self._root.iterdir() if self._root.is_dir() else ()) if part.is_dir()]
        found = {part.name: _bytes_below(part, seen) for part in parts if not part.is_symlink()}
        for name in self._parts - found.keys():
            self._bytes.remove(name)
        for name, size in found.items():
            self._bytes.labels(name).set(size)
        self._parts = set(found)


def _bytes_below(folder: Path, seen: set[tuple[int, int]]) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it has just been removed
                found = os.lstat(os.path.join(parent, name))
                if (place := (found.st_dev, found.st_ino)) not in seen:
                    seen.add(place)
                    total += 512 * found.st_blocks
    return total
