"""Real processes: found by record, by descent and by their mark, and ended in any state."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flowfleet.local.processes import Record, end_processes, find_processes, read_records, write_record
from flowfleet.local.stack import MARK, StateDir
from flowfleet.local.supervision.cleanup import end_stack

SLEEP = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
CHILD = "import os; print(os.getpid(), flush=True); " + SLEEP
"""Tells its pid itself: between fork and exec a process has no environment to be found by."""
PARENT = (
    "import subprocess, sys, time;"
    f"subprocess.Popen([sys.executable, '-c', {CHILD!r}], start_new_session=True); time.sleep(60)"
)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(started: list[subprocess.Popen[str]], code: str, state: Path | None = None) -> subprocess.Popen[str]:
    env = {**os.environ, MARK: str(state)} if state else dict(os.environ)
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    started.append(process)
    return process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_record_finds_its_process_and_not_a_later_one_with_the_same_pid(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    process = start(started, SLEEP)
    write_record(tmp_path / "a.json", process.pid)
    (tmp_path / "broken.json").write_text("{")
    (record,) = read_records(tmp_path)

    assert [p.pid for p in find_processes([record], tmp_path)] == [process.pid]
    assert record.started is not None
    earlier = Record("a", process.pid, record.started - 100.0)
    assert find_processes([earlier], tmp_path) == []


def test_a_record_without_a_start_time_needs_the_mark(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    stranger, ours = start(started, PARENT), start(started, PARENT, tmp_path)
    line(stranger)
    line(ours)  # both run, so both have their environment

    found = find_processes([Record("x", stranger.pid), Record("y", ours.pid)], tmp_path)

    assert ours.pid in [p.pid for p in found]
    assert stranger.pid not in [p.pid for p in found]


def test_an_orphan_in_its_own_session_is_found_by_its_mark(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    parent = start(started, PARENT, tmp_path)
    orphan = int(line(parent))
    parent.kill()
    parent.wait()

    assert [p.pid for p in find_processes([], tmp_path)] == [orphan]
    end_stack(StateDir(tmp_path))
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE


def test_a_controller_that_hides_its_environment_is_found_by_its_command_line(
    tmp_path: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root reads the environment of a process that cannot be dumped."""

    def refuse(process: psutil.Process) -> dict[str, str]:
        raise psutil.AccessDenied(process.pid)

    for folder in ("ours", "theirs"):
        command = [sys.executable, "-c", SLEEP, "-m", "services.controller", "--state-dir", str(tmp_path / folder)]
        started.append(subprocess.Popen(command, text=True))
    start(started, SLEEP)
    monkeypatch.setattr(psutil.Process, "environ", refuse)
    assert [p.pid for p in find_processes([], tmp_path / "ours")] == [started[0].pid]


def test_a_process_deaf_to_sigterm_is_killed(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    process = start(started, DEAF)
    assert line(process) == "deaf"

    begun = time.monotonic()
    stubborn = end_processes([psutil.Process(process.pid)], grace_s=0.3)

    assert [p.pid for p in stubborn] == [process.pid]
    assert process.wait(5) == -9
    assert time.monotonic() - begun < 5


def test_ending_a_stack_ends_trainers_and_forgets_all(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    state = StateDir(tmp_path)
    service, trainer = start(started, SLEEP), start(started, PARENT, tmp_path)
    rank = int(line(trainer))
    write_record(state.records / "rollout-0.json", service.pid)
    state.trainers.mkdir()
    (state.trainers / "job.json").write_text(json.dumps({"pid": trainer.pid, "started": "123", "port_file": "x"}))
    state.stack_file.write_text("{}")

    assert end_stack(state, grace_s=2.0) == 3

    assert service.wait(5) == trainer.wait(5) == -15
    assert not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_one_that_bears_its_mark_too_late_is_ended_as_well(
    tmp_path: Path, started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between fork and exec a process has no environment, so the first look misses it."""
    first, late = start(started, CHILD, tmp_path), start(started, CHILD, tmp_path)
    for process in (first, late):
        line(process)
    environ, asked = psutil.Process.environ, []

    def read(process: psutil.Process) -> dict[str, str]:
        if process.pid == late.pid:
            asked.append(process.pid)
            if psutil.pid_exists(first.pid) and psutil.Process(first.pid).status() != psutil.STATUS_ZOMBIE:
                return {}
        return dict(environ(process))

    monkeypatch.setattr(psutil.Process, "environ", read)
    assert end_stack(StateDir(tmp_path)) == 2
    assert len(asked) > 1
    assert late.wait(5) != 0
