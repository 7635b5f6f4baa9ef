"""Finding and ending the processes of a stack.

A process of a stack is known in three ways, because each alone misses some: its record (a JSON file with its pid,
written by whoever started it), its being a descendant of a recorded one, and the mark that every process of the stack
inherits in its environment. So a trainer's ranks are found even when the launcher above them was killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from flowfleet.local.files import read_own, write_atomically
from flowfleet.local.stack import MARK

CLOCK_SLACK_S = 2.0
"""Start times read in different processes may differ a little."""

KILL_GRACE_S = 5.0
POLL_S = 0.02


@dataclass(frozen=True)
class Record:
    """Record of a started process. `started` (seconds since the epoch) tells it from a later process with the same pid.
    A record without it counts only while the process bears the stack's mark."""

    name: str
    pid: int
    started: float | None = None


def write_record(path: Path, pid: int) -> None:
    """Notes a process that was just started. One that has ended already gets no record."""
    try:
        started = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return
    write_atomically(path, json.dumps({"pid": pid, "started": started}))


def read_records(directory: Path) -> Iterator[Record]:
    """Reads the records in a directory; skips files that are not records (half written), and those that another user
    wrote or could write: their processes would be ended."""
    for path in sorted(directory.glob("*.json")):
        try:
            data = json.loads(read_own(path))
            started = data.get("started")
            yield Record(path.stem, int(data["pid"]), started if isinstance(started, float) else None)
        except (OSError, ValueError, TypeError, KeyError):
            continue


def find_processes(records: Iterable[Record], state_dir: Path) -> list[psutil.Process]:
    """Returns all live processes of the stack, except this one."""
    by_pid: dict[int, psutil.Process] = {}
    marked = [process for process in psutil.process_iter() if _has_mark(process, state_dir)]
    for process in [*_recorded(records, state_dir), *marked]:
        by_pid[process.pid] = process
        try:
            by_pid.update((child.pid, child) for child in process.children(recursive=True))
        except psutil.Error:
            continue  # it ended meanwhile; its children carry the mark
    by_pid.pop(os.getpid(), None)
    return [process for process in by_pid.values() if _runs(process)]


def end_processes(processes: Iterable[psutil.Process], grace_s: float) -> list[psutil.Process]:
    """Sends SIGTERM, then SIGKILL to those that still run after `grace_s` seconds. Returns those that had to be
    killed."""
    waiting = list(processes)
    stubborn = _end(waiting, "terminate", grace_s)
    _end(stubborn, "kill", KILL_GRACE_S)
    return stubborn


def _end(processes: list[psutil.Process], action: str, timeout_s: float) -> list[psutil.Process]:
    """Waits for the ends of processes and returns those still running. A zombie has ended: its parent may be slow."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            getattr(process, action)()
    deadline = time.monotonic() + timeout_s
    while (running := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return running


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _recorded(records: Iterable[Record], state_dir: Path) -> Iterator[psutil.Process]:
    for record in records:
        try:
            process, started = psutil.Process(record.pid), record.started
            is_close = started is not None and abs(process.create_time() - started) <= CLOCK_SLACK_S
            if is_close or (started is None and _has_mark(process, state_dir)):
                yield process
        except psutil.Error:
            continue


def _has_mark(process: psutil.Process, state_dir: Path) -> bool:
    try:
        return bool(process.environ().get(MARK) == str(state_dir))
    except psutil.AccessDenied:
        return _is_hidden_controller(process, state_dir)
    except (psutil.Error, OSError):
        return False


def _is_hidden_controller(process: psutil.Process, state_dir: Path) -> bool:
    """True for a controller of the stack, which lets only root read its environment: its command line tells."""
    try:
        words, is_own = process.cmdline(), process.uids().real == os.getuid()
    except (psutil.Error, OSError):
        return False
    return is_own and "services.controller" in words and ("--state-dir", str(state_dir)) in itertools.pairwise(words)
