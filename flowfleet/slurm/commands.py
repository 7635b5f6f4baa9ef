"""`flowfleet slurm up | down | status`, from a machine that has Slurm's programs."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flowfleet.local.files import make_private, read_own, write_atomically
from flowfleet.local.stack import StackError, StateDir
from flowfleet.slurm.copies import check_folder
from flowfleet.slurm.head import CLIENT, DOWN, JOB_FILE, SCRIPT, write_job
from flowfleet.slurm.script import SlurmOptions, render
from flowfleet.slurm.tools import slurm, state_of

DOWN_S: Final = 330.0
"""Longest wait for a fleet that saves. Slurm then ends it."""
POLL_S: Final = 0.5


@dataclass(frozen=True)
class Fleet:
    """State of a fleet."""

    job_id: str
    state: str
    """Slurm's word; empty where the job has ended."""
    reason: str
    nodes: str
    serves: bool


def submit(options: SlurmOptions) -> str:
    """Submits the fleet's job and returns its id. Raises StackError for what Slurm refuses, and where a fleet of this
    folder is queued or runs."""
    folder = options.state_dir
    check_folder(folder)
    if (known := find_fleet(folder)) is not None and known.state:
        raise StackError(
            f"job {known.job_id} is the fleet of {folder} ({known.state}): end it with `flowfleet slurm down`, or give "
            "another --state-dir"
        )
    make_private(folder / "logs")
    script = folder / SCRIPT
    write_atomically(script, render(options))
    try:
        slurm("sbatch", "--test-only", str(script))
    except StackError as error:
        raise StackError(f"{error}; `sinfo` shows what there is: change the options that ask for more") from None
    for name in (CLIENT, DOWN):
        (folder / name).unlink(missing_ok=True)
    return write_job(folder, slurm("sbatch", "--parsable", str(script)))


def find_fleet(folder: Path) -> Fleet | None:
    """The fleet that was submitted from a folder; None if none was."""
    try:
        job_id = str(json.loads(read_own(folder / JOB_FILE))["job_id"])
    except FileNotFoundError:
        return None
    state, reason, nodes = state_of(job_id)
    return Fleet(job_id, state, reason, nodes, state == "RUNNING" and (folder / CLIENT).exists())


def require_fleet(folder: Path) -> Fleet:
    """Raises StackError where no fleet was submitted."""
    if (fleet := find_fleet(folder)) is None:
        raise StackError(f"no fleet was submitted from {folder}: run `flowfleet slurm up`, or give its --state-dir")
    return fleet


def await_serving(folder: Path, timeout_s: float) -> Fleet:
    """Waits until the fleet serves. Raises StackError for one that ends before, with the end of its log."""
    deadline = time.monotonic() + timeout_s
    while not (fleet := require_fleet(folder)).serves:
        if not fleet.state:
            raise StackError(
                f"the fleet ended while it started; the end of its log:\n{StateDir(folder).log_tail('slurm')}"
            )
        if time.monotonic() > deadline:
            raise StackError(
                f"job {fleet.job_id} is {fleet.state} ({fleet.reason}) after {timeout_s:.0f} s; it stays queued"
            )
        time.sleep(POLL_S)
    return fleet


def end_fleet(folder: Path, timeout_s: float = DOWN_S) -> bool:
    """Ends the fleet; its trainers save first. False where it has ended already."""
    fleet = require_fleet(folder)
    if not fleet.state:
        return False
    write_atomically(folder / DOWN, "")
    if fleet.state == "RUNNING":
        slurm("scancel", "--signal=TERM", "--batch", fleet.job_id)
    deadline = time.monotonic() + timeout_s
    while (state := state_of(fleet.job_id)[0]) in ("RUNNING", "COMPLETING") and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if state:  # it waits, also for its next run
        slurm("scancel", fleet.job_id)
    if (successor := require_fleet(folder)).job_id != fleet.job_id:
        slurm("scancel", successor.job_id)
    (folder / CLIENT).unlink(missing_ok=True)
    return True


def log_of(folder: Path, name: str) -> Path:
    """A log of the fleet. Raises StackError for a name that has none."""
    logs = sorted((folder / "logs").glob("*.log"))
    if (file := folder / "logs" / f"{name}.log") not in logs:
        raise StackError(f"{folder} has no log {name}; it has {', '.join(log.stem for log in logs) or 'none'}")
    return file
