"""Names of files: in errors that lack them, under locales that cannot hold them; links to files; and proof that two
processes see the same files."""

import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def filesystem_id() -> str:
    """The same in every process that sees the same mounts, and in no other. A container has one of its own, even where
    it is reached at 127.0.0.1. Where there is no /proc: the host's name."""
    try:
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/mnt")]
    except OSError:
        parts = [platform.node()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names the path in errors that name none: a full disk's are of a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError for a path that the locale's encoding cannot hold: Python keeps its bytes as half characters,
    which no message and no file can take."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(name).decode(errors="replace").encode("ascii", "replace").decode()
            raise ValueError(
                f"{shown}: this locale ({sys.getfilesystemencoding()}) cannot hold the name: set LC_ALL=C.UTF-8, or "
                "PYTHONUTF8=1"
            ) from None


def link_or_copy(source: str, target: str) -> None:
    """Links a file where the file system can, else copies it."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
