"""Training runs for the figures of docs/results.md: each in a process of its own on two CPU cores of its own, several
at once."""

from __future__ import annotations

import argparse
import math
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from flowfleet.demo.run import run_demo

CORES_PER_RUN = 2
LAST_START_S = 200.0
"""No run is started with less of the budget left."""
RUN_LIMIT_S = 3600.0
"""What takes longer hangs, and is ended."""
TAIL_LINES = 25


@dataclass(frozen=True)
class Run:
    """One training: a recipe, what is changed in it, a seed, and where its results go."""

    recipe: str
    """Stem of recipes/<recipe>.toml."""
    seed: int
    directory: Path
    changes: tuple[str, ...] = ()
    keeps_model: bool = False
    """Leaves the trained model, for others to learn from."""
    rewards: tuple[str, ...] = ()
    """How rewards start, as `flowfleet up --reward` takes them, of which no scorer has the name."""

    @property
    def is_done(self) -> bool:
        return (self.directory / "summary.json").exists()

    @property
    def log(self) -> Path:
        return self.directory.with_name(f"{self.directory.name}.log")


def core_groups(cores: Sequence[int], size: int = CORES_PER_RUN) -> list[tuple[int, ...]]:
    """Disjoint groups of `size` cores; a remainder stays idle. A single smaller group where there are fewer."""
    groups = [tuple(cores[start : start + size]) for start in range(0, len(cores) - size + 1, size)]
    return groups or [tuple(cores)]


def own_cores() -> list[tuple[int, ...]]:
    """Splits this process's cores into one group per run."""
    return core_groups(sorted(os.sched_getaffinity(0)))


def train_all(
    runs: Sequence[Run], parallel: int, budget_s: float, console: Console, visible_gpus: str = ""
) -> dict[Run, str]:
    """Trains what is not done yet, in this order, `parallel` at once, and returns the errors of those that failed.

    Runs that the budget leaves no time for are not started. `visible_gpus` as CUDA_VISIBLE_DEVICES has it: all runs
    share them.
    """
    groups = own_cores()
    free: queue.Queue[tuple[int, ...]] = queue.Queue()
    for group in groups[:parallel]:
        free.put(group)
    deadline = time.monotonic() + budget_s
    todo = [run for run in runs if not run.is_done]
    with ThreadPoolExecutor(parallel) as pool:
        errors = list(pool.map(lambda run: _train_if_time(run, free, deadline, console, visible_gpus), todo))
    return {run: error for run, error in zip(todo, errors, strict=True) if error is not None}


def _train_if_time(
    run: Run, free: queue.Queue[tuple[int, ...]], deadline: float, console: Console, visible_gpus: str
) -> str | None:
    """The error, if there was one."""
    if deadline - time.monotonic() < LAST_START_S:
        return None
    cores = free.get()
    try:
        started = time.monotonic()
        error = _train_in_process(run, cores, visible_gpus)
        took = f"{time.monotonic() - started:.0f} s on cores {', '.join(map(str, cores))}"
        console.print(f"{run.directory.name}: {'failed' if error else 'done'}, {took}", highlight=False)
        return error
    finally:
        free.put(cores)


def _train_in_process(run: Run, cores: tuple[int, ...], visible_gpus: str) -> str | None:
    """Trains in a process, whose stack it takes with it when it ends."""
    command = [sys.executable, "-m", "bench.learning.curves", "--only", run.recipe, str(run.seed), str(run.directory)]
    command += ["--keep-model"] * run.keeps_model
    command += [part for reward in run.rewards for part in ("--reward", reward)]
    command += ["--cores", *map(str, cores), *(part for change in run.changes for part in ("--set", change))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "CUDA_VISIBLE_DEVICES": visible_gpus}
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("wb") as log:
        try:
            code = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=RUN_LIMIT_S
            ).returncode
        except subprocess.TimeoutExpired:
            return f"not done after {RUN_LIMIT_S:.0f} s; its output is {run.log}"
    if code or not run.is_done:
        return "\n".join([f"exit status {code}; the end of {run.log}:", *_tail(run.log)])
    return None


def add_options(parser: argparse.ArgumentParser) -> None:
    """How runs are trained: `parallel`, `budget`, `gpus` and `set`."""
    parser.add_argument("--parallel", type=_at_once, default=1, help="runs at once, two cores each (1)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds; starts nothing in the last 200")
    parser.add_argument("--gpus", default="", help="that all runs share, as 0 or 0,1; without it they train on CPUs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every job; repeatable")


def report(runs: Iterable[Run], errors: Mapping[Run, str], console: Console) -> int:
    """Prints which runs are not done, and what is wrong with others. The exit status."""
    missing = [run.directory for run in runs if not run.is_done and run not in errors]
    if missing:
        names = ", ".join(f"{path.parent.name}/{path.name}" for path in missing)
        console.print(f"\nnot done: {names}", highlight=False, soft_wrap=True)
    for run, error in errors.items():
        console.print(f"\n{run.directory}: {error}", markup=False, highlight=False, soft_wrap=True)
    return 1 if errors else 0


def _at_once(text: str) -> int:
    most = len(own_cores())
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"with {CORES_PER_RUN} cores a run, take 1 to {most} here, not {text}")
    return int(text)


def train_here(run: Run, cores: Sequence[int]) -> None:
    """In this process, which keeps to `cores` from now on, as does all that it starts. Leaves figures and pictures."""
    os.sched_setaffinity(0, cores)
    changes = [f"seed={run.seed}", *run.changes]
    recipe, now = Path(f"recipes/{run.recipe}.toml"), datetime.now(UTC)
    run_demo(recipe, run.directory, changes, Console(width=160), now, rewards=run.rewards)
    for large in ("stack", *([] if run.keeps_model else ["model"])):
        shutil.rmtree(run.directory / large)


def _tail(path: Path) -> Iterator[str]:
    yield from path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
