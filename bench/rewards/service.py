"""A reward service as a process, for benchmarks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[tuple[psutil.Process, str]]:
    """A reward service that is up, and its address."""
    port_file = folder / "port"
    argv = [sys.executable, "-m", "services.reward", "--port-file", str(port_file), "--log-level", "warning", *flags]
    process = psutil.Popen(argv)
    try:
        while not port_file.exists():
            assert process.poll() is None, "the service did not start"
            time.sleep(0.05)
        yield process, port_file.read_text()
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time so far of a process and its descendants."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))
