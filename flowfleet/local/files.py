"""Files of a stack: private folders, small files of which a reader never sees half, and whose files are believed."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import TextIO

from flowfleet.filesystem import writing

_PRIVATE, _PRIVATE_FILE = 0o700, 0o600
_WRITABLE_BY_OTHERS, _ENTERED_BY_OTHERS = 0o022, 0o011


def make_private(folder: Path) -> None:
    """Makes a folder that its owner alone may enter, or makes it so, whatever the umask. A link of the user's is left
    as it is. Raises PermissionError for a folder of another user."""
    folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to the user {status.st_uid}, who could change what is in it")
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(folder, _PRIVATE)


def take(folder: Path, names: frozenset[str]) -> None:
    """Makes a folder, or takes one over: private where it holds nothing but `names`, else its mode stays, as other
    users may need it. Raises PermissionError for one in which another user could replace files. Root may use any."""
    folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    status, user = folder.stat(), os.geteuid()
    if user != 0 and status.st_uid not in (user, 0):
        raise PermissionError(f"{folder} belongs to the user {status.st_uid}, who could change what is in it")
    if status.st_mode & stat.S_ISVTX:  # shared on purpose, as /tmp is
        return
    if names.issuperset(os.listdir(folder)):
        os.chmod(folder, _PRIVATE)
    elif status.st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(f"other users may write in {folder}: run `chmod go-w` on it")


def is_private(folder: Path) -> bool:
    """True for a folder of this user that no other user may enter."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & _ENTERED_BY_OTHERS


def write_atomically(path: Path, text: str) -> None:
    """Replaces `path` by `text`, readable by its owner alone (0600); makes the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with writing(path), os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_own(path: Path) -> str:
    """The text of a file that this user wrote. Raises OSError as `open_own` does."""
    with open_own(path, os.O_RDONLY) as file:
        return file.read()


def open_own(path: Path, flags: int) -> TextIO:
    """Opens a file of this user; with O_CREAT it is made, or made private. Raises OSError for a link, and for a file
    that another user owns or may write. Its mode tells nothing in a private folder, which no other user can enter."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _PRIVATE_FILE)
    file = os.fdopen(descriptor, "r+" if flags & os.O_RDWR else "r", encoding="utf-8")
    if flags & os.O_CREAT:
        os.fchmod(file.fileno(), _PRIVATE_FILE)
    status = os.fstat(file.fileno())
    is_open = status.st_mode & _WRITABLE_BY_OTHERS and not is_private(path.parent)
    if status.st_uid != os.geteuid() or is_open:
        file.close()
        raise PermissionError(f"{path} is not believed: other users may write it; remove it")
    return file


class Watched:
    """A file that others replace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, ...] = ()

    def has_changed(self) -> bool:
        """True at the first look after each change; False while there is no file."""
        try:
            stat = self.path.stat()
        except OSError:
            return False
        before, self._seen = self._seen, (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        return before != self._seen
