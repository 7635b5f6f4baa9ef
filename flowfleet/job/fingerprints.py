"""Fingerprints of what a job reads: stored when it begins, and compared by each process that loads something of it.

Rollouts and trainers load the same model at different times. Files that are replaced in between give them different
bases, which no later check sees.
"""

import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Final

from flowfleet import hub
from flowfleet.job.spec import JobSpec

_FORMAT: Final = "1"
"""Begins each fingerprint, and is raised when the same files get another: releases compare only their own."""
CHANGED: Final = "is not what it was when the job began"
"""Words of every reason that names a changed input."""
OF_A_FILE: Final = "sha256:"
"""Begins the version of a reward that is a fingerprint of its file."""
READ: Final = (".safetensors", ".json", ".txt", ".model", ".jinja")
"""Suffixes of the files that loading a model, an adapter or a checkpoint reads."""
_WHOLE_BYTES: Final = 2**26
_STRIDE, _PIECE = 2**20, 2**12
_READERS: Final = 8
_KEPT: Final = 10_000
_SETTLED_S: Final = 3.0
"""Age of a change from which the next one is sure to have another time: file systems count in steps."""
_ABSENT: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_UNREADABLE: Final = "unreadable"


def inputs_of(spec: JobSpec) -> dict[str, str]:
    """Setting → path of the model and of what the job starts or learns from. A name of the Hub has its commit."""
    teachers = {f"algorithm.teachers.{name}.adapter": teacher.adapter for name, teacher in spec.teachers.items()}
    named = {"model.path": spec.model.path, "model.adapter": spec.model.adapter, "trainer.resume": spec.trainer.resume}
    found = {setting: path for setting, path in {**named, **teachers}.items() if path}
    return {setting: path for setting, path in found.items() if hub.name_of(path) is None}


def fingerprint(path: str | Path, read: tuple[str, ...] = READ) -> str:
    """Digest of the names, sizes and contents of a folder's files, or of a file; "" where nothing is there.

    A file above 64 MiB is read in 4 KiB of each MiB, so that a checkpoint of 40 GB takes seconds: weights that were
    trained on, rounded or replaced differ nearly everywhere. Times and places do not count, so copies are equal. Links
    to nothing are absent. Of a file that cannot be read only the name counts, and who loads it says so; such a digest
    is of a format of its own, because another process may read that file.
    """
    root = Path(path)
    files = sorted(files_of(root, read)) if os.path.isdir(root) else [root]
    with ThreadPoolExecutor(_READERS, "fingerprint") as pool:
        digests = pool.map(_digest, files)
        known = [(file, digest) for file, digest in zip(files, digests, strict=True) if digest]
    if not known:
        return ""
    lines = "\n".join(f"{file.relative_to(root)} {digest}" for file, digest in known)
    form = f"{_FORMAT}-partly" if any(digest == _UNREADABLE for _, digest in known) else _FORMAT
    return f"{form}:{hashlib.sha256(lines.encode(errors='surrogateescape')).hexdigest()}"


def fingerprints(spec: JobSpec) -> dict[str, str]:
    """Setting → fingerprint of each input that is there."""
    return {setting: digest for setting, path in inputs_of(spec).items() if (digest := fingerprint(path))}


def differ(known: str, found: str) -> bool:
    """Returns True if both fingerprints are of one format, and not equal."""
    return known != found and known.partition(":")[0] == found.partition(":")[0]


def change(known: Mapping[str, str], found: Mapping[str, str], places: Mapping[str, str]) -> str:
    """Reason to pause for an input that differs; empty where none does. What is gone its reader misses."""
    for setting, digest in found.items():
        if differ(known.get(setting, ""), digest):
            return (
                f"{setting}: {places.get(setting, 'its data')} {CHANGED}: put the former files back and resume the "
                "job, or submit a new job with these"
            )
    return ""


def files_of(root: Path, read: tuple[str, ...] = READ) -> Iterator[Path]:
    """Files of a folder that its fingerprint covers."""
    seen: set[str] = set()
    for parent, folders, names in os.walk(root, followlinks=True):
        if (here := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(here)
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if name.endswith(read) and not name.startswith("."))


def _digest(file: Path) -> str:
    """Digest of a file's size and content; "" where none is there."""
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            return ""
        if time.time() - found.st_ctime < _SETTLED_S:
            return _content(file)
        return _kept(file, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
    except OSError as error:
        return "" if error.errno in _ABSENT else _UNREADABLE


@lru_cache(_KEPT)
def _kept(file: Path, *state: int) -> str:
    """Keeps what `_content` finds of a file in this state: many jobs have the same model, and are opened again."""
    return _content(file)


def _content(file: Path) -> str:
    found = hashlib.sha256()
    with file.open("rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        found.update(f"{size} ".encode())
        if size <= _WHOLE_BYTES:
            return hashlib.file_digest(opened, lambda: found).hexdigest()
        for start in (*range(0, size, _STRIDE), size - _PIECE):
            found.update(os.pread(opened.fileno(), _PIECE, start))
    return found.hexdigest()
