"""Process of the stack: is started, seen to die or hang, and started again when its delay is over."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowfleet.backoff import backoff_s
from flowfleet.local.plan import Kind, ProcessPlan
from flowfleet.local.processes import write_record
from flowfleet.local.stack import RunningProcess, StateDir
from flowfleet.process.forks import FORK_S, FORK_SERVER, IMPORTS_S, Address
from flowfleet.process.started import StartedProcess
from flowfleet.rpc.kinds import without_own

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 15.0
STABLE_AFTER_S = 30.0
"""A process that ran this long starts over with the shortest delay."""


@dataclass
class Backoff:
    """Doubles the delay each time a process dies young."""

    failures: int = 0

    def after(self, ran_for_s: float) -> float:
        """Seconds to wait before the next start of a process that ran for `ran_for_s`."""
        self.failures = 1 if ran_for_s >= STABLE_AFTER_S else self.failures + 1
        return backoff_s(self.failures, FIRST_DELAY_S, LONGEST_DELAY_S)


MAX_MISSED = 6
"""Questions in a row without a good answer, after which a process hangs."""

logger = logging.getLogger(__name__)


class Child:
    """Owned by the supervisor's one thread, but for `checked`; `poll` never blocks."""

    def __init__(
        self,
        plan: ProcessPlan,
        state: StateDir,
        start_timeout_s: float,
        forks: Callable[[], Address | None] = lambda: None,
    ) -> None:
        """`forks` gives the server that may fork the process."""
        self.plan = plan
        self._forks = forks
        self._told = 0
        self._has_forked = False
        self.healthy = False
        self._start_timeout_s = start_timeout_s
        self._missed = 0
        self._state = state
        self._backoff = Backoff()
        self._process: StartedProcess | None = None
        self._started = 0.0
        self._restart_at: float | None = None
        self.ends = self.is_over = False
        """Is not started again; is looked at no more."""

    def start(self) -> None:
        """Starts the process in a session of its own, output appended to its log."""
        self._start()
        self._told = self.pid

    def _start(self) -> None:
        self.healthy, self._restart_at, self._missed = False, None, 0
        self._started = time.monotonic()
        with self._state.log(self.plan.name).open("ab") as log:
            self._process = StartedProcess(
                self.plan.argv,
                env={**self._inherited(), **self.plan.env},
                output=log.fileno(),
                session=True,
                note=self._note,
                address=self._forks() if self.plan.forks else None,
                within_s=FORK_S if self._has_forked else IMPORTS_S,
            )

    def _note(self, pid: int, _: str) -> None:
        self._has_forked = True
        try:
            write_record(self._state.records / f"{self.plan.name}.json", pid)
        except OSError as error:
            logger.warning("%s runs without a record, found by its mark alone: %s", self.plan.name, error)

    def _inherited(self) -> dict[str, str]:
        """The supervisor's environment; the keys and tokens in it are the controller's alone."""
        inherited = dict(os.environ) if self.plan.kind is Kind.CONTROLLER else without_own(os.environ)
        address = self._forks()
        return inherited | ({FORK_SERVER: address.to_text()} if address and self.plan.kind is Kind.CONTROLLER else {})

    def exit_code(self) -> int | None:
        """How the process ended; None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def pid(self) -> int:
        """Id of the most recently started process; 0 before the first, and while the fork server imports."""
        return self._process.pid if self._process else 0

    def checked(self, pid: int, is_alive: bool) -> None:
        """Process `pid` was asked. Until its first good answer it starts, loads and need not answer."""
        if pid != self.pid:
            return
        self.healthy |= is_alive
        self._missed = 0 if is_alive or not self.healthy else self._missed + 1

    def end(self) -> None:
        """Ends the process for good. Checkups kill it if that takes too long."""
        self.ends = True
        if self._process is not None:
            self._process.terminate()

    def poll(self) -> bool:
        """Kills the process if it hangs, and restarts it if it ended and its delay is over; what cannot be started is
        tried again later. Returns whether it has another id than when it was last asked."""
        self._keep()
        is_new, self._told = self.pid not in (0, self._told), self.pid or self._told
        return is_new

    def _keep(self) -> None:
        code = self.exit_code()
        if code is None:
            self._kill_if_hung()
        if code is None or self.ends:
            return
        now = time.monotonic()
        if self._restart_at is None:
            delay_s = self._backoff.after(now - self._started)
            self._restart_at = now + delay_s
            self.healthy = False
            logger.warning("%s ended with code %d; restarting it in %.1f s", self.plan.name, code, delay_s)
        if now < self._restart_at:
            return
        try:
            self._start()
        except OSError as error:  # no memory to fork, or a full disk: the others serve
            delay_s = self._backoff.after(0.0)
            self._restart_at = now + delay_s
            logger.error("%s could not be started; trying again in %.1f s: %s", self.plan.name, delay_s, error)

    def _kill_if_hung(self) -> None:
        """Kills with SIGKILL: a stopped process takes no other signal. Its descendants end with it."""
        assert self._process is not None
        never_served = not self.healthy and time.monotonic() - self._started > self._start_timeout_s
        if self._missed < MAX_MISSED and not never_served:
            return
        self._missed = 0
        what = f"did not serve in {self._start_timeout_s:.0f} s" if never_served else "hangs"
        logger.error("%s (pid %d) %s; restarting it", self.plan.name, self.pid, what)
        self._process.kill()

    def describe(self) -> RunningProcess:
        """Returns the process's entry in stack.json."""
        planned: Any = {name: getattr(self.plan, name) for name in ("address", "metrics", "engine", "devices", "pool")}
        return RunningProcess(pid=self.pid, log=str(self._state.log(self.plan.name)), **planned)
