"""A disk of its own for what jobs write, small enough to be filled: a tmpfs, where this process may mount one."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from pathlib import Path
from typing import Self

SIZE_MIB = 768
FILLER = ".filler"


class SmallDisk:
    """Mounted for the length of a `with` block. `mounted` is False where mounting is not allowed: then the folder lies
    on the machine's disk and is never filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mounted = False

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m,mode=0700", "tmpfs", str(self.folder)]
        with contextlib.suppress(OSError):
            self.mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        return self

    def __exit__(self, *_: object) -> None:
        if os.path.ismount(self.folder):
            subprocess.run(["umount", "-l", str(self.folder)], capture_output=True, check=False)

    def fill(self) -> int:
        """Takes all space that is left; returns its bytes."""
        assert self.mounted
        with (self.folder / FILLER).open("ab") as file:
            for size in (2**24, 2**20, 4096):
                with contextlib.suppress(_Full):
                    while True:
                        _grow(file.fileno(), size)
            return os.fstat(file.fileno()).st_size

    def free(self) -> None:
        (self.folder / FILLER).unlink(missing_ok=True)


class _Full(Exception):
    """No such piece fits any more."""


def _grow(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, size)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _Full from None
        raise
