"""Orders processes of a fork server (`forkserver.py`); started.py falls back to exec where that cannot serve.

ForkServer      the owner of one: starts it when it is first needed, and another one when that is gone
Address         how other processes find it: by the environment variable FLOWFLEET_FORK_SERVER
Forked          a process that was ordered: no id until its server has imported everything
StartedProcess  `subprocess.Popen` that forks where it can
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from flowfleet.process.forkserver import MESSAGE_BYTES, Order
from flowfleet.process.proxies import is_proxy_variable
from flowfleet.process.service import PATIENT_THREADS

FORK_SERVER: Final = "FLOWFLEET_FORK_SERVER"
"""Environment variable that holds the `Address` of a fork server."""
IMPORTS_S: Final = 300.0
FORK_S: Final = 10.0
LOST: Final = 255
"""Stands for the exit code of a process whose server ended first: only a parent learns the real one."""
_LONGEST_FOLDER: Final = 80
_LATE: Final = frozenset(
    {
        *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK"),
        *("PYTHONSAFEPATH", "PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "_"),
    }
)
_EARLY: Final = ("FLOWFLEET_FP8_",)

Note = Callable[[int, str], None]
"""Takes a process's id and start (`start_ticks`), before the process runs anything."""
Files = tuple[int, int, int]
"""Descriptors of standard input, output and error."""


def no_note(pid: int, started: str) -> None:
    pass


def fork_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a fork server. Its OpenMP has one thread: no thread may run where processes are forked, and
    these set their own number. Libraries look for GPUs when they are imported: they must ask NVML, because no process
    can use CUDA whose parent has asked CUDA itself."""
    return {**PATIENT_THREADS, **env, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def fixed_digest(env: Mapping[str, str]) -> str:
    """Digest of the variables that libraries may read while they are imported. A fork cannot change those."""
    fixed = {
        name: value
        for name, value in env.items()
        if name not in _LATE
        and not is_proxy_variable(name)
        and (name.startswith(_EARLY) or not name.startswith("FLOWFLEET_"))
    }
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Address:
    """A fork server as others find it."""

    path: str
    modules: tuple[str, ...]
    fixed: str
    """`fixed_digest` of its environment."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environ(cls) -> Address | None:
        """The server that FLOWFLEET_FORK_SERVER names."""
        text = os.environ.get(FORK_SERVER)
        if not text:
            return None
        fields = json.loads(text)
        return cls(fields["path"], tuple(fields["modules"]), fields["fixed"])

    def forks(self, module: str, env: Mapping[str, str]) -> bool:
        return module in self.modules and fixed_digest(env) == self.fixed


class Forked:
    """A process that a fork server is to start. `pid` is 0 until it has answered; `poll` takes the answer.

    Raises OSError where no server listens.
    """

    def __init__(self, path: str, order: Order, files: Files, note: Note = no_note, within_s: float = IMPORTS_S):
        self.pid = 0
        self.returncode: int | None = None
        self._note = note
        self._deadline = time.monotonic() + within_s
        self._pidfd = -1
        self._connection: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(FORK_S)
        try:
            self._connection.connect(path)
            socket.send_fds(self._connection, [order.to_bytes()], files)
        except OSError:
            self._connection.close()
            raise

    @property
    def never_ran(self) -> bool:
        """True for one whose server ended, or was given up, before it answered."""
        return self.returncode is not None and self.pid == 0

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        self._advance(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.returncode is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired([], timeout or 0.0)
            self._advance(min(left, 1.0))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is not None:
            return
        if self.pid == 0:
            self.abandon()
        elif self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.Signals(number))

    def abandon(self) -> None:
        """Gives up a process that has not answered; it ends before it has run anything."""
        if self.pid == 0:
            self._finish(-signal.SIGKILL)

    def release(self) -> None:
        """Leaves a process to itself."""
        self._close()

    def _advance(self, timeout_s: float) -> None:
        """Takes a message that has come, of the process or of its server."""
        if self.returncode is not None:
            return
        if self._connection is None:
            if self._pidfd < 0 or select.select([self._pidfd], [], [], timeout_s)[0]:
                self._finish(LOST)
        elif select.select([self._connection], [], [], timeout_s)[0]:
            self._hear(self._connection)
        elif self.pid == 0 and time.monotonic() > self._deadline:
            self._finish(LOST)

    def _hear(self, connection: socket.socket) -> None:
        try:
            message = connection.recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        answer = json.loads(message or b"{}")
        if not answer and self.pid == 0:
            self._finish(LOST)
        elif not answer:  # the server has ended, and tells no exit code any more
            connection.close()
            self._connection = None
        elif "code" in answer:
            self._finish(answer["code"])
        else:
            self._begin(connection, answer["pid"], answer["started"])

    def _begin(self, connection: socket.socket, pid: int, started: str) -> None:
        with contextlib.suppress(ProcessLookupError):  # killed at once: its code follows
            self._pidfd = os.pidfd_open(pid)
        try:
            self._note(pid, started)
        except BaseException:
            self._finish(-signal.SIGKILL)
            raise
        self.pid = pid
        with contextlib.suppress(OSError):
            connection.send(b"{}")

    def _finish(self, code: int) -> None:
        self.returncode = code
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class ForkServer:
    """Owns a fork server, which ends with this process. It also forks modules `besides` those that it imports."""

    def __init__(
        self,
        command: Sequence[str],
        env: Callable[[], dict[str, str]],
        output: Path,
        besides: Sequence[str] = (),
    ) -> None:
        self._command, self._env, self._output, self._besides = command, env, output, besides
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._has_answered = False
        self.address: Address | None = None

    def order(self, order: Order, files: Files, note: Note = no_note) -> Forked:
        """Has a process forked; starts the server first if there is none."""
        address = self.ensure()

        def first(pid: int, started: str) -> None:
            note(pid, started)
            self._has_answered = True

        return Forked(address.path, order, files, first, FORK_S if self._has_answered else IMPORTS_S)

    def ensure(self) -> Address:
        """Starts the server unless it runs. Does not wait for its imports."""
        if self.address is None or not self.runs:
            self.close()
            self.address = self._start()
        return self.address

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Kills the server; what it forked lives on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._process, self._folder, self.address, self._has_answered = None, None, None, False

    def _start(self) -> Address:
        is_long = len(tempfile.gettempdir()) > _LONGEST_FOLDER  # the path of a socket has at most 107 bytes
        self._folder = Path(tempfile.mkdtemp(prefix="flowfleet-", dir="/tmp" if is_long else None))
        path, env = str(self._folder / "forks"), self._env()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, self._output.open("ab") as output:
            listener.bind(path)
            listener.listen(128)
            self._process = subprocess.Popen(
                [*self._command, str(listener.fileno())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        modules = self._command[self._command.index("flowfleet.process.forkserver") + 1 :]
        return Address(path, (*modules, *self._besides), fixed_digest(env))
