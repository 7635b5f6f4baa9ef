"""Processes of a benchmark that serve until it ends."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 300.0
"""Longest wait for a process to serve: engines import much."""
END_S = 120.0
TAIL = 4000


@contextmanager
def started(ready: Path, module: str, *flags: str, **environment: str) -> Iterator[int]:
    """Runs `python -m MODULE FLAGS` until the end of the block. Yields its process id once the file `ready` exists.

    Raises RuntimeError with the end of its log, which is written next to `ready`, if it does not start.
    """
    log = ready.with_suffix(".log")
    with log.open("wb") as out:
        argv, env = [sys.executable, "-m", module, *flags], {**os.environ, **environment}
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{module} did not start:\n{log.read_text(errors='replace')[-TAIL:]}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
