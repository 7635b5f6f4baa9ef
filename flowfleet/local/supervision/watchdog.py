"""Ends a stack whose supervisor died without a chance to do so (kill -9, out of memory).

The supervisor holds the other end of this process's standard input. A clean stop writes `FAREWELL` there; a death
closes it without a word, on every operating system and for every cause. It runs in a session of its own, so that
nothing sent to the supervisor's process group reaches it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from flowfleet.local.stack import NOBODY, WATCHDOG, StackError, StateDir
from flowfleet.local.supervision.cleanup import end_stack

FAREWELL = b"stopped"


def start_watchdog(state: StateDir) -> subprocess.Popen[bytes]:
    """Starts one for the calling process."""
    with state.log("watchdog").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", WATCHDOG, str(state.path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def dismiss(watchdog: subprocess.Popen[bytes]) -> None:
    """Ends a watchdog after a clean stop."""
    watchdog.communicate(FAREWELL)


def watch(state: StateDir) -> None:
    """Returns when the supervisor is gone and, had it not said farewell, its stack with it."""
    if sys.stdin.buffer.read() == FAREWELL:
        return
    with contextlib.suppress(StackError), state.lock(NOBODY):  # a new supervisor that was faster cleans up itself
        end_stack(state)


if __name__ == "__main__":
    watch(StateDir(Path(sys.argv[1])))
