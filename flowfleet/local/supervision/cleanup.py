"""Ending a whole stack, used alike by its supervisor, by its watchdog, and over what an earlier crash left behind."""

from __future__ import annotations

import psutil

from flowfleet.local.processes import end_processes, find_processes, read_records
from flowfleet.local.stack import StateDir

GRACE_S = 8.0


def end_stack(state: StateDir, grace_s: float = GRACE_S) -> int:
    """Ends every process of the stack and forgets them; returns how many there were.

    The controller goes first, so that it launches nothing more, and Redis last, so that all others could still write.
    The others are looked for until no new one is found, since one that was just being started bore no mark before.
    """
    controller, redis = _named(state, "controller"), _named(state, "redis")
    end_processes(controller, grace_s)
    others: list[psutil.Process] = []
    while left := [process for process in _all(state) if process not in [*redis, *others]]:
        end_processes(left, grace_s)
        others += left
    end_processes(redis, grace_s)
    state.forget()
    return len({*controller, *others, *redis})


def _named(state: StateDir, name: str) -> list[psutil.Process]:
    """The one recorded process of that name, without its descendants: trainers are the controller's."""
    pids = {record.pid for record in read_records(state.records) if record.name == name}
    return [process for process in _all(state) if process.pid in pids]


def _all(state: StateDir) -> list[psutil.Process]:
    records = [*read_records(state.records), *read_records(state.trainers)]
    return find_processes(records, state.path)
