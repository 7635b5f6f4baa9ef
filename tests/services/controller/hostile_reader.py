"""`python -m tests.services.controller.hostile_reader own|same FOLDER`: a controller, and a reader that tries to get
its secrets before and after it was confined. Prints what it got as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from services.controller.reading.confinement import confine, hide_memory
from services.controller.reading.process import load

ORDINARY = 12_345
LIBC = ctypes.CDLL(None, use_errno=True)


def main(user: str, folder: Path) -> None:
    load(["http"])
    token = folder / "token"
    token.write_text("hunter2")
    token.chmod(0o400)
    if user == "same":
        token = _reachable(token)
        os.setgroups([])
        os.setresgid(ORDINARY, ORDINARY, ORDINARY)
        os.setresuid(ORDINARY, ORDINARY, ORDINARY)
    LIBC.prctl(4, 1, 0, 0, 0)  # as a process that was started as this user
    ready, hidden = socket.socketpair()
    controller = os.fork()
    if controller == 0:
        ready.close()
        hidden.recv(1)
        hide_memory()
        hidden.send(b"x")
        hidden.recv(1)  # until the reader has ended
        os._exit(0)
    hidden.close()
    secrets = {"environ": f"/proc/{controller}/environ", "mem": f"/proc/{controller}/mem", "token": str(token)}
    before = {name: _by_python(path) for name, path in secrets.items()}
    ready.send(b"x")
    ready.recv(1)
    is_ours = os.geteuid() != 0
    confine([])
    after = {name: _by_python(path) for name, path in secrets.items()}
    after |= {f"{name} by C": _by_c(path) for name, path in secrets.items()}
    after["program"] = _tried(lambda: subprocess.run(["/bin/cat", str(token)], check=True))
    after["connect"] = _tried(lambda: socket.create_connection(("127.0.0.1", 9), 1))
    after["unix"] = _tried(lambda: socket.socket(socket.AF_UNIX).connect("/run/x.sock"))
    has_landlock = LIBC.syscall(444, None, ctypes.c_size_t(0), 1) > 0
    print(json.dumps({"before": before, "after": after, "kernel": has_landlock or not is_ours}))


def _reachable(token: Path) -> Path:
    """A copy that an ordinary user can reach: folders of tests are their maker's alone."""
    folder = Path(tempfile.mkdtemp())
    os.chown(folder, ORDINARY, ORDINARY)
    copy = folder / "token"
    copy.write_text("hunter2")
    os.chown(copy, ORDINARY, ORDINARY)
    copy.chmod(0o400)
    return copy


def _by_python(path: str) -> str:
    def read() -> None:
        with open(path, "rb") as file:
            if not path.endswith("mem"):
                assert file.read(1)

    return _tried(read)


def _by_c(path: str) -> str:
    descriptor = LIBC.open(path.encode(), os.O_RDONLY)
    return "refused" if descriptor < 0 else "read"


def _tried(act: Callable[[], object]) -> str:
    try:
        act()
    except PermissionError:
        return "refused"
    return "read"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
