"""The controller's side of the reader: processes that read what jobs name (process.py), one question each at a
time. The environment that they get holds nothing of the controller's: the system's own variables, and what the operator
set as FLOWFLEET_READER_NAME, which they see as NAME. Credentials of stores are given so.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.controller.reading.process import ANSWER, QUESTION

PROCESSES = 4
DEADLINE_S = 600.0
"""Limit of one file. A reader that takes longer is ended."""
MOST_MEMORY_BYTES = 2 * 2**30
"""Memory of a process, where the controller's own limit is not lower."""
PREFIX = "FLOWFLEET_READER_"
_CGROUPS = tuple(map(Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")))
_PASSED = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONHOME", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")


class Reader:
    """Up to `PROCESSES` readers, started as they are needed and ended by `close`. Blocking; for several threads."""

    def __init__(
        self,
        schemes: Sequence[str] = (),
        networks: Sequence[str] = (),
        program: Sequence[str] = ("-m", "services.controller.reading.process"),
        *,
        tables: bool = False,
    ) -> None:
        """`tables`: whether they also read Parquet and Arrow, for which they load more code."""
        told = {"schemes": sorted(set(schemes)), "networks": list(networks), "tables": tables}
        self._settings = json.dumps({**told, "memory": memory_bytes()})
        self._program = program
        self._slots = threading.BoundedSemaphore(PROCESSES)
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        self._closed = False

    def read_file(self, descriptor: int, limit: int) -> bytes:
        """The first `limit` bytes of an open file. Raises OSError."""
        return self.ask({"do": "read", "limit": limit}, [descriptor])[1]

    def fetch(self, url: str, limit: int) -> bytes:
        """The first `limit` bytes of a URL. Raises OSError, FileNotFoundError where nothing is there."""
        return self.ask({"do": "read", "url": url, "limit": limit})[1]

    def read_prompts(self, question: Mapping[str, Any], out: int, source: int | str) -> tuple[int, int]:
        """Appends prompts of an open file, or of one at a URL, to the file `out` (packed.py). Returns their number and
        bytes there. Raises OSError, and ValueError for what is wrong with them."""
        if isinstance(source, str):
            answer = self.ask({"do": "prompts", **question, "url": source}, [out])[0]
        else:
            answer = self.ask({"do": "prompts", **question}, [out, source])[0]
        return answer["count"], answer["size"]

    def files_of(self, url: str) -> list[str]:
        """URLs of a data set's files. Raises OSError, and ValueError if its split is ambiguous."""
        found: list[str] = self.ask({"do": "files", "url": url})[0]["files"]
        return found

    def picture_size(self, descriptor: int, form: str) -> tuple[int, int]:
        """Width and height of an open picture in PIL's format `form`. Raises OSError."""
        width, height = self.ask({"do": "size", "format": form}, [descriptor])[0]["size"]
        return width, height

    def ask(self, question: Mapping[str, Any], descriptors: Sequence[int] = ()) -> tuple[dict[str, Any], bytes]:
        """Raises OSError for what the reader could not do, or did not in time, and ValueError for what it refuses."""
        with self._slots:
            process = self._take()
            try:
                answer, body = process.ask(question, descriptors)
            except (OSError, ValueError) as error:
                process.end()
                raise OSError(
                    f"the reader of data did not answer ({error}): the data may need more than its {memory_bytes()} "
                    "bytes of memory, else the controller's log may say why"
                ) from error
            self._give_back(process)
        if "missing" in answer:
            raise FileNotFoundError(answer["missing"])
        if "refused" in answer:
            raise ValueError(answer["refused"])
        if "error" in answer:
            raise OSError(answer["error"])
        return answer, body

    def close(self) -> None:
        """Ends the readers. Those that are busy end with their answer."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _take(self) -> _Process:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Process([sys.executable, *self._program], self._settings)

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        process.end()


class _Process:
    def __init__(self, command: Sequence[str], settings: str) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), settings],
                env=clean_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection.settimeout(DEADLINE_S)

    def ask(self, question: Mapping[str, Any], descriptors: Sequence[int]) -> tuple[dict[str, Any], bytes]:
        data = json.dumps(question).encode()
        socket.send_fds(self._connection, [QUESTION.pack(len(data))], list(descriptors))
        self._connection.sendall(data)
        size, body_size = ANSWER.unpack(self._receive(ANSWER.size))
        answer: dict[str, Any] = json.loads(self._receive(size))
        return answer, self._receive(body_size)

    def end(self) -> None:
        self._connection.close()
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._connection.recv(min(size - len(data), 1 << 20))
            if not part:
                raise OSError("it has ended")
            data += part
        return bytes(data)


def memory_bytes() -> int:
    """Memory that a reader may take: less than what this process, or its container, may."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    for file in _CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max", and where there is no such file
            limits.append(int(file.read_text(encoding="ascii")))
    return min([MOST_MEMORY_BYTES, *(limit // 2 for limit in limits if limit > 0)])


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns a reader's environment: its part of the controller's, and where its code is. That is not the current
    folder, which may hold a `services` of the user's."""
    own = {name.removeprefix(PREFIX): value for name, value in environment.items() if name.startswith(PREFIX)}
    passed = {name: environment[name] for name in _PASSED if name in environment}
    code = os.pathsep.join(path or os.getcwd() for path in sys.path)
    own_code = {"PYTHONPATH": code, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    arrow = {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # others reserve a gigabyte, which counts as used
    return {**passed, "HOME": "/nonexistent", **own_code, **arrow, **own}
