"""Starts the processes of a rehearsal, and reads what each used of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

READY_S = 300.0
END_S = 120.0


@dataclass
class Child:
    """A process of the rehearsal."""

    name: str
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, name: str, argv: Sequence[str], env: Mapping[str, str], folder: Path) -> Child:
        with (folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *argv],
                env={**os.environ, **env},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        return cls(name, process)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def wait_for_line(child: Child, folder: Path, line: str = "ready") -> None:
    """Waits until a child's log contains the line. Raises RuntimeError if the child ends first or takes too long."""
    log, deadline = folder / f"{child.name}.log", time.monotonic() + READY_S
    while line not in log.read_text(errors="replace"):
        if child.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{child.name} did not start: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


@dataclass(frozen=True)
class Usage:
    """Usage of one process: CPU seconds since its start, and current memory, descriptors and threads."""

    cpu_s: float
    rss: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return cls(times.user + times.system, process.memory_info().rss, process.num_fds(), process.num_threads())


def read_rows(path: Path) -> list[list[object]]:
    rows: list[list[object]] = json.loads(path.read_text()) if path.exists() else []
    return rows
