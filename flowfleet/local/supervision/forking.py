"""The fork server of a stack: rollouts and trainers are forked from a process that has imported torch once for all."""

from __future__ import annotations

import os
import sys

from flowfleet.local.plan import Plan, ProcessPlan
from flowfleet.local.stack import MARK, StateDir
from flowfleet.process.commands import ROLLOUT, TRAINER, forkserver_command
from flowfleet.process.forks import Address, ForkServer, fork_environment
from flowfleet.rpc.kinds import without_own


class StackForks:
    """Owns the server, unless FLOWFLEET_FORK_SERVER names one. A stack without rollouts to fork has none."""

    def __init__(self, plan: Plan, state: StateDir) -> None:
        self._shared = Address.from_environ()
        self._state = state
        own = self._shared is None and any(_forks_rollout(process) for process in plan.processes)
        command = forkserver_command(sys.executable, ROLLOUT, TRAINER)
        self._server = ForkServer(command, self._environment, state.log("forkserver")) if own else None

    def address(self) -> Address | None:
        """The server; None while another one, in place of one that has ended, imports."""
        if self._server is None:
            return self._shared
        had_one, is_same = self._server.address is not None, self._server.runs
        address = self._server.ensure()
        return address if is_same or not had_one else None

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _environment(self) -> dict[str, str]:
        return fork_environment({**without_own(os.environ), MARK: str(self._state.path)})


def _forks_rollout(process: ProcessPlan) -> bool:
    return process.forks and process.argv[:3] == (sys.executable, "-m", ROLLOUT)
