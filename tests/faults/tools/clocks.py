"""Clocks of single processes, set by libfaketime while they run. The machine's clock is never touched.

libfaketime is preloaded into a process and reads its offset from a file of that process; the monotonic clock stays
true. Without the library nothing is preloaded and no clock can be skewed. Three kinds of process never have it: Redis,
whose allocator does not start under it; trainers, and rollouts that take broadcasts, because Python's time.sleep, which
they use, fails under libfaketime where the monotonic clock is true.

The library is preloaded by LD_PRELOAD, so a process with a clock must be started by exec: a fork of a running process
keeps the true clock.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "FLOWFLEET_LIBFAKETIME"
"""Environment variable that names the library where it is not in one of the usual places."""
_PLACES = ("/usr/lib", "/usr/lib64", "/usr/local/lib")
_NAME = "libfaketimeMT.so.1"
_TRUE = "+0"


def find_library() -> Path | None:
    """The library of FLOWFLEET_LIBFAKETIME, or that of the system's package. Raises ValueError for a wrong path."""
    given = os.environ.get(LIBRARY)
    if given:
        if not Path(given).is_file():
            raise ValueError(f"{LIBRARY}={given}: there is no such file; name libfaketimeMT.so.1, or unset it")
        return Path(given).resolve()
    found = (path for place in _PLACES for path in sorted(Path(place).glob(f"**/faketime/{_NAME}")))
    return next(found, None)


@dataclass(frozen=True)
class Clocks:
    """The offsets of a stack's processes, a file each in `directory`."""

    directory: Path
    library: Path | None

    def environment(self, name: str) -> dict[str, str]:
        """What a process needs so that its clock can be set; nothing without the library."""
        if self.library is None:
            return {}
        self.set(name, _TRUE)
        return {
            "LD_PRELOAD": str(self.library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file(name)),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }

    def has(self, name: str) -> bool:
        """Whether a process was given a clock that can be set."""
        return self._file(name).exists()

    def python_without(self) -> Path:
        """An interpreter for trainers, which inherit the controller's environment: this one, without the library."""
        script = self.directory / "python"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {shlex.quote(sys.executable)} "$@"\n')
        script.chmod(0o700)
        return script

    def set(self, name: str, offset: str) -> None:
        """Sets a process's clock, as "+3600" or "-3600" seconds from the true time. It takes up to a second."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._file(name).write_text(f"{offset}\n")  # not replaced: libfaketime may hold it open

    def right(self, name: str) -> None:
        self.set(name, _TRUE)

    def _file(self, name: str) -> Path:
        return self.directory / f"{name}.time"
