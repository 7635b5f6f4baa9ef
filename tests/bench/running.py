"""Benchmarks as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 500


def run_bench(
    name: str, flags: str, folder: Path, environment: Mapping[str, str] | None = None, launch: Sequence[str] = ()
) -> tuple[str, list[dict[str, Any]]]:
    """Runs `python -m bench.NAME`, or `python LAUNCH -m bench.NAME`. Returns what it printed, and the figures that it
    wrote."""
    output = folder / f"{name}.json"
    command = [sys.executable, *launch, "-m", f"bench.{name}", *flags.split(), "--json", str(output)]
    env = {**os.environ, **(environment or {})}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads(output.read_text())
    assert written["machine"]["cores"] > 0
    assert written["command"].startswith(f"bench.{name} ")
    return done.stdout, written["figures"]
