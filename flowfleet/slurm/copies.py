"""Redis's data of a fleet on Slurm: on the disk of its node, with a copy in the shared folder.

Network file systems stall the flushes of an append-only file, so the server writes to local disk. A copy follows each
checkpoint, and every few minutes what else changed. When the node dies, the fleet starts from the copy: jobs resume
from a checkpoint that it names. Newer samples are made again, and newer jobs must be submitted again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flowfleet.local.stack import StackError

COPY: Final = "redis-copy"
DATA: Final = "appendonly*"
"""A file of Redis 6, a folder of later ones."""
LOOK_S: Final = 2.0
EVERY_S: Final = 300.0
SETTLED_S: Final = 1.0
"""From the checkpoint's files until the controller has noted it in Redis."""
TRIES: Final = 5

log = logging.getLogger(__name__)


def local_folder(shared: Path, key: str, env: Mapping[str, str] = os.environ) -> Path:
    """Folder on this node's disk for the data of one run of the job `key` of the fleet in `shared`."""
    disk = env.get("SLURM_TMPDIR") or env.get("TMPDIR") or tempfile.gettempdir()
    return Path(disk) / f"flowfleet-{os.geteuid()}-{key}-{zlib.crc32(str(shared).encode()):08x}"


class Copies:
    """`live` is Redis's folder, `shared` the fleet's state directory."""

    def __init__(self, live: Path, shared: Path) -> None:
        self._live, self._copy = live, shared / COPY
        self._jobs = shared / "jobs"
        self._seen: object = None

    def restore(self) -> bool:
        """Makes the server's folder, with the data of the newest copy alone. False without a copy, which leaves what an
        earlier run of the server left there. Raises StackError for a folder of another user."""
        _claim(self._live)
        for copy in (self._copy, self._old):
            if copy.is_dir():
                shutil.rmtree(self._live, ignore_errors=True)
                shutil.copytree(copy, self._live)
                return True
        return False

    def keep(self, stop: threading.Event) -> None:
        """Copies until `stop` is set."""
        copied_at, complained = time.monotonic(), False
        while not stop.wait(LOOK_S):
            seen = self._checkpoints()
            if seen == self._seen and time.monotonic() - copied_at < EVERY_S:
                continue
            if stop.wait(SETTLED_S):
                return
            try:
                self.copy()
                self._seen, copied_at, complained = seen, time.monotonic(), False
            except OSError as error:  # a full disk, or a server that is too busy rewriting its files
                if not complained:
                    log.warning("could not copy Redis's data to the shared folder; trying again: %s", error)
                complained = True

    def copy(self) -> None:
        """Replaces the copy. A command that is cut in two at its end is dropped by the server that reads it. Raises
        OSError."""
        new = self._copy.with_suffix(".new")
        for tried in range(1, TRIES + 1):
            shutil.rmtree(new, ignore_errors=True)
            try:
                self._copy_to(new)
                break
            except (OSError, shutil.Error) as error:  # Redis began a new file meanwhile
                if tried == TRIES:
                    raise OSError(f"{self._live}: {error}") from None
                time.sleep(SETTLED_S)
        shutil.rmtree(self._old, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self._copy.rename(self._old)
        new.rename(self._copy)
        shutil.rmtree(self._old, ignore_errors=True)

    def _copy_to(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        found = [*self._live.glob(DATA)]
        for source in found:
            if source.is_dir():
                shutil.copytree(source, folder / source.name, copy_function=_durably)
            else:
                _durably(str(source), str(folder / source.name))
        if not found:
            raise FileNotFoundError("Redis has no append-only file there")

    @property
    def _old(self) -> Path:
        return self._copy.with_suffix(".old")

    def _checkpoints(self) -> frozenset[str]:
        return frozenset(str(path) for path in self._jobs.glob("*/checkpoints/*") if not path.name.startswith("."))


def _claim(folder: Path) -> None:
    """Makes a folder that others cannot read, where everybody may write."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise StackError(f"{folder} is not a folder of this user: remove it, or set TMPDIR to another place")
    folder.chmod(0o700)


def _durably(source: str, target: str) -> str:
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
    return target


def check_folder(folder: Path) -> None:
    """Raises StackError for a folder in which the fleet cannot write."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StackError(f"cannot write in {folder} ({error.strerror}): give another --state-dir") from None
