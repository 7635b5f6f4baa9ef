"""Training runs for the figures of docs/results.md: each in a process of its own on CPU cores of its own, and on one
GPU or none; several at once."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from flowfleet.demo.run import run_demo
from flowfleet.local.rewards import parse_reward
from flowfleet.process.service import end_with_parent

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


def own_cores(size: int = CORES_PER_RUN) -> list[tuple[int, ...]]:
    """Splits this process's cores into one group per run."""
    return core_groups(sorted(os.sched_getaffinity(0)), size)


@dataclass(frozen=True)
class Place:
    """What a run has to itself, but for the GPU, which others may share."""

    cores: tuple[int, ...]
    gpu: str
    """Its number, for CUDA_VISIBLE_DEVICES; empty: it trains on the CPU."""
    rewards: tuple[str, ...] = ()
    """NAME=HOST:PORT of rewards that run here already, in place of a run's own of these names."""


def places(options: argparse.Namespace) -> list[Place]:
    """One for each run at once, on the GPUs in turn. Ends the program where there are too few cores."""
    groups, gpus = own_cores(options.cores_per_run), options.gpus.strip(",").split(",")
    if options.parallel > len(groups):
        sys.exit(
            f"--parallel {options.parallel} is too much: {len(groups)} runs of {options.cores_per_run} cores find room "
            "here; lower it or --cores-per-run"
        )
    return [Place(cores, gpus[number % len(gpus)]) for number, cores in enumerate(groups[: options.parallel])]


def train_all(
    listed: Callable[[Mapping[Run, str]], Sequence[Run]], where: Sequence[Place], budget_s: float, console: Console
) -> dict[Run, str]:
    """Trains what is listed and not done yet, in this order, and returns the errors of those that failed.

    `listed` gets the errors so far, and is asked again whenever a run has ended, for what is to be trained may depend
    on it. Runs that the budget leaves no time for are not started.
    """
    deadline = time.monotonic() + budget_s
    free, begun, errors = [*where], set[Run](), dict[Run, str]()
    running: dict[Future[str | None], tuple[Run, Place]] = {}
    with ThreadPoolExecutor(len(where)) as pool:
        while True:
            todo = [run for run in listed(errors) if run not in begun and not run.is_done] if free else []
            for run in todo if deadline - time.monotonic() >= LAST_START_S else ():
                if not free:
                    break
                place = free.pop(0)
                begun.add(run)
                running[pool.submit(_train_and_tell, run, place, console)] = run, place
            if not running:
                return errors
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run, place = running.pop(future)
                if (error := future.result()) is not None:
                    errors[run] = error
                    place = replace(place, rewards=())  # one of them may be why: later runs start their own
                free.append(place)


def _train_and_tell(run: Run, place: Place, console: Console) -> str | None:
    """The error, if there was one."""
    started = time.monotonic()
    error = _train_in_process(run, place)
    took = f"{time.monotonic() - started:.0f} s on cores {', '.join(map(str, place.cores))}"
    where = f" and GPU {place.gpu}" if place.gpu else ""
    console.print(f"{run.directory.name}: {'failed' if error else 'done'}, {took}{where}", highlight=False)
    return error


def _train_in_process(run: Run, place: Place) -> str | None:
    """Trains in a process, whose stack it takes with it when it ends."""
    command = [sys.executable, "-m", "bench.learning.curves", "--only", run.recipe, str(run.seed), str(run.directory)]
    command += ["--keep-model"] * run.keeps_model
    here = {parse_reward(reward).name: reward for reward in place.rewards}
    command += [part for one in run.rewards for part in ("--reward", here.get(parse_reward(one).name, one))]
    command += ["--cores", *map(str, place.cores), *(part for change in run.changes for part in ("--set", change))]
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("wb") as log:
        try:
            code = subprocess.run(
                command,
                env=environment_of(place),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=RUN_LIMIT_S,
                preexec_fn=end_with_parent,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"not done after {RUN_LIMIT_S:.0f} s; its output is {run.log}"
    if code or not run.is_done:
        return "\n".join([f"exit status {code}; the end of {run.log}:", *tail(run.log)])
    return None


def add_options(parser: argparse.ArgumentParser) -> None:
    """How runs are trained: `parallel`, `cores_per_run`, `budget`, `gpus` and `set`."""
    parser.add_argument("--parallel", type=_positive, default=1, help="runs at once (1)")
    parser.add_argument("--cores-per-run", type=_positive, default=CORES_PER_RUN, help=f"({CORES_PER_RUN})")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds; starts nothing in the last 200")
    parser.add_argument("--gpus", default="", help="as 0 or 0,1: each run has one, in turn; without it, CPUs train")
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


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number, 1 or more")
    return int(text)


def train_here(run: Run, cores: Sequence[int]) -> None:
    """In this process, which keeps to `cores` from now on, as does all that it starts. Leaves figures and pictures."""
    os.sched_setaffinity(0, cores)
    changes = [f"seed={run.seed}", *run.changes]
    recipe, now = Path(f"recipes/{run.recipe}.toml"), datetime.now(UTC)
    run_demo(recipe, run.directory, changes, Console(width=160), now, rewards=run.rewards)
    for large in ("stack", *([] if run.keeps_model else ["model"])):
        shutil.rmtree(run.directory / large)


def environment_of(place: Place) -> dict[str, str]:
    """Environment for processes at a place."""
    return {**os.environ, "OMP_NUM_THREADS": str(len(place.cores)), "CUDA_VISIBLE_DEVICES": place.gpu}


def tail(path: Path) -> Iterator[str]:
    """Yields the last lines of a log."""
    yield from path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
