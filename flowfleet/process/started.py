"""Starts a process as `subprocess.Popen` does, but forked where a fork server can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from flowfleet.process.forks import IMPORTS_S, LOST, Address, Forked, Note, no_note
from flowfleet.process.forkserver import Order

_POLL_S: Final = 0.02


class StartedProcess:
    """A process that was forked where `address` can, and else started by exec. `argv` begins with the interpreter.

    Its `pid` is 0 while the server that is to fork it imports; `started` waits for that.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        output: int,
        error: int | None = None,
        cwd: str | None = None,
        session: bool = False,
        note: Note = no_note,
        address: Address | None = None,
        within_s: float = IMPORTS_S,
        ranks: int = 0,
    ) -> None:
        self.args = [*argv]
        self._ranks = ranks
        self._env, self._cwd, self._session, self._note = dict(env), cwd or os.getcwd(), session, note
        self._null = os.open(os.devnull, os.O_RDONLY)
        self._files = self._null, os.dup(output), os.dup(output if error is None else error)
        self._process: Forked | subprocess.Popen[bytes] = self._fork(address, within_s) or self._exec()
        if isinstance(self._process, subprocess.Popen):
            self._close_files()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        """The exit code; None while it runs. Falls back to exec where the server did not fork."""
        code = self._process.poll()
        if isinstance(self._process, Forked) and (self._process.pid or self._process.never_ran):
            if self._process.never_ran and self._process.returncode == LOST:
                self._process = self._exec()
                code = None
            self._close_files()
        return code

    def started(self) -> StartedProcess:
        """Waits until it runs."""
        while self.poll() is None and self.pid == 0:
            time.sleep(_POLL_S)
        return self

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        return self.started()._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _fork(self, address: Address | None, within_s: float) -> Forked | None:
        is_module = self.args[:2] == [sys.executable, "-m"]
        if address is None or not is_module or not address.forks(self.args[2], self._env):
            return None
        order = Order(self.args[2], self.args[3:], self._env, self._cwd, self._session, self._ranks)
        try:
            return Forked(address.path, order, self._files, self._note, within_s)
        except OSError:
            return None

    def _exec(self) -> subprocess.Popen[bytes]:
        stdin, stdout, stderr = self._files
        process = subprocess.Popen(
            self.args,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=self._env,
            cwd=self._cwd,
            start_new_session=self._session,
        )
        self._note(process.pid, "")
        return process

    def _close_files(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = ()  # type: ignore[assignment]
