"""A chaos run from start to end: a schedule, the job under faults, the same job without them, a report.

The reference is given the drops that the schedule injects. Where the run dropped others, a second reference is given
those, so that weights are always compared with a run of the same samples.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowfleet.client.client import Client
from flowfleet.client.types import Job
from flowfleet.job.spec import JobSpec
from flowfleet.local.files import write_atomically
from flowfleet.local.session import stop_stack
from flowfleet.local.stack import StackError, StateDir
from tests.faults.account import account
from tests.faults.injector import Injector, Stuck
from tests.faults.job import Mode, make_job, shape_of, weights_hash
from tests.faults.ledger import Ledger
from tests.faults.reference import references, result_of
from tests.faults.report import Report, Samples, figures
from tests.faults.schedule import KINDS, make_schedule, poisons
from tests.faults.stack import ChaosStack, chaos_stack
from tests.faults.targets import Targets
from tests.faults.tools.clocks import LIBRARY, Clocks, find_library
from tests.faults.tools.disk import SmallDisk
from tests.faults.watch import Watch

MARKER = ".flowfleet-chaos"
STACKS = ("stack", "reference")
END_S = 600.0
"""Time allowed for the steps after the last fault, or for a whole reference run."""
CORES_FOR_BOTH = 8
"""Number of cores from which the reference runs next to the job under faults."""

Say = Callable[[str], None]


class Interrupted(Exception):
    """SIGTERM or SIGINT came: the report says what was done until then."""


@dataclass(frozen=True)
class Options:
    """What `flowfleet chaos` takes."""

    faults: int
    seed: int
    mode: Mode = "lora"
    job: Path | None = None
    directory: Path = Path("runs/chaos")
    kinds: tuple[str, ...] = KINDS
    report: Path | None = None
    reference: str = ""
    """Hash of the reference's weights; empty: it is run."""
    spacing: int = 4
    hang_s: float = 8.0


@dataclass
class _Run:
    """What is known so far; a report can be made of it at any time."""

    options: Options
    spec: JobSpec
    ledger: Ledger
    skipped: dict[str, str]
    started: float = field(default_factory=time.monotonic)
    job: Job | None = None
    samples: Samples = field(default_factory=Samples)
    weights: str = ""
    reference: str = ""
    seconds: float = 0.0
    reference_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False

    def save(self) -> Path:
        """Writes the report as it is now, after each fault and at the end; returns where."""
        target = self.options.report or self.options.directory / "report.json"
        write_atomically(target, self.report().model_dump_json(indent=2) + "\n")
        return target

    def report(self) -> Report:
        job = self.job
        own = [
            f"fault {entry.number} ({entry.kind} {entry.target}): {text}"
            for entry in self.ledger.entries
            for text in entry.failures
        ]
        return Report(
            mode=self.options.mode,
            seed=self.options.seed,
            faults_asked=self.options.faults,
            faults_counted=self.ledger.num_counted,
            kinds_skipped=self.skipped,
            job_status=job.status if job else "",
            job_reason=job.reason if job else "",
            steps=self.spec.schedule.steps,
            steps_done=job.progress.step if job else 0,
            seconds=round(self.seconds or time.monotonic() - self.started, 1),
            reference_seconds=round(self.reference_seconds, 1),
            samples=self.samples,
            weights=self.weights,
            reference=self.reference,
            kinds=figures(self.ledger.entries),
            failures=(*own, *self.failures),
            interrupted=self.interrupted,
            machine={"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
            faults=[asdict(entry) for entry in self.ledger.entries],
        )


def run_chaos(options: Options, say: Say) -> Report:
    """Runs it all and writes the report. Raises ValueError and StackError where it cannot begin."""
    directory = options.directory.expanduser().resolve()
    library = find_library()
    kinds, skipped = possible(options.kinds, has_clocks=library is not None, has_disk=can_mount(directory))
    if not kinds:
        raise ValueError(f"none of the faults asked for can be done here: {'; '.join(skipped.values())}")
    spec = make_job(options.job, options.mode, None, options.hang_s)
    shape = shape_of(spec, options.spacing)
    schedule = make_schedule(options.faults, options.seed, shape, kinds)
    spec = make_job(options.job, options.mode, shape.steps_for(options.faults), options.hang_s)
    _make_fresh(directory)
    run = _Run(options, spec, Ledger(directory / "chaos.jsonl"), skipped)
    for kind, why in skipped.items():
        say(f"skipped: {kind}: {why}")
    say(f"{options.faults} faults on a {options.mode} job of {spec.schedule.steps} steps, seed {options.seed}")
    injected = poisons(schedule)
    stop = threading.Event()
    try:
        with _interruptible(), references(directory, spec, say, stop) as run_reference:
            beside = (os.cpu_count() or 1) >= CORES_FOR_BOTH
            first = None if options.reference else run_reference(injected)
            if first is not None and not beside:
                run.reference, run.reference_seconds = result_of(first)
            with chaos_stack(directory / "stack", spec, injected, Clocks(directory / "clocks", library)) as chaos:
                _under_faults(run, chaos, schedule, say)
            if first is not None and beside:
                run.reference, run.reference_seconds = result_of(first)
            run.reference = options.reference or run.reference
            found = set(run.samples.drops_found)
            if run.weights and found != set(injected):
                say("other samples were dropped than those injected: a second reference is given the same drops")
                again = run_reference({name: injected.get(name, "error") for name in found})
                run.reference, run.reference_seconds = result_of(again)
    except Interrupted:
        run.interrupted = True
    except (Stuck, StackError) as error:
        run.failures.append(str(error))
    finally:
        stop.set()
        say(f"report: {run.save()}")
    return run.report()


def possible(kinds: Sequence[str], *, has_clocks: bool, has_disk: bool) -> tuple[tuple[str, ...], dict[str, str]]:
    """Kinds that this machine can do, and why it cannot do the others."""
    reasons = {}
    if not has_clocks:
        reasons["skew-clock"] = f"there is no libfaketime: install the package faketime, or set {LIBRARY}"
    if not has_disk:
        reasons["full-disk"] = "this process may not mount a small disk: run it as root"
    skipped = {kind: why for kind, why in reasons.items() if kind in kinds}
    return tuple(kind for kind in kinds if kind not in skipped), skipped


def can_mount(directory: Path) -> bool:
    """Whether a small disk can be had; a probe is mounted and taken away again."""
    with SmallDisk(directory / "probe") as disk:
        mounted = disk.mounted
    (directory / "probe").rmdir()
    return mounted


# -- the job under faults ----------------------------------------------------------------------------------------------


def _under_faults(run: _Run, chaos: ChaosStack, schedule: Sequence[Any], say: Say) -> None:
    started = time.monotonic()
    with Client(chaos.stack.url) as client:
        job = client.submit(run.spec)
        say(f"job {job.id} on {chaos.stack.url}; logs are in {chaos.state.logs}")
        watch = Watch(chaos.stack.url, job.id)
        targets = Targets(chaos, watch, job.id, run.spec)
        targets.start()
        try:
            Injector(targets, client, run.ledger, say, run.save, started).run(schedule)
            watch.until(lambda sight: sight.ended, END_S)
        finally:
            targets.close()
            watch.close()
            run.seconds = time.monotonic() - started
            _look_at_end(run, client, targets)


def _look_at_end(run: _Run, client: Client, targets: Targets) -> None:
    """Collects what the job left, as far as it came."""
    job_id = targets.job_id
    with _noted(run.failures):
        run.job = client.job(job_id)
        records = client.samples(job_id, order="oldest")
        run.samples = account(run.spec, run.job, records, targets.trained, poisons_of(run))
        if run.job.status == "succeeded":
            run.weights = weights_hash(Path(run.job.results["model"]))


def poisons_of(run: _Run) -> tuple[str, ...]:
    """Samples whose poison struck: of the faults that were done."""
    return tuple(
        sorted(entry.data["sample"] for entry in run.ledger.entries if entry.kind == "poison-reward" and entry.counted)
    )


# -- the rest ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Turns SIGTERM and SIGINT into Interrupted. Main thread only; elsewhere signals stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _noted(failures: list[str]) -> Iterator[None]:
    """Notes what goes wrong while a run is looked at, so that the report still comes."""
    try:
        yield
    except Exception as error:
        failures.append(f"the end of the job could not be read: {type(error).__name__}: {error}")


def _make_fresh(directory: Path) -> None:
    """Empties a directory of an earlier run and ends its stacks. Raises ValueError for a directory that is none."""
    if directory.exists() and any(directory.iterdir()):
        if not (directory / MARKER).exists():
            raise ValueError(
                f"{directory} holds something else than a chaos run: give another --state-dir, or remove it"
            )
        for name in STACKS:
            stop_stack(StateDir(directory / name))
            SmallDisk(directory / name / "jobs").forget()
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MARKER).touch()
