"""Calls of Slurm's programs, each with a time limit and an error in words."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

from flowfleet.local.stack import StackError

TIMEOUT_S: Final = 60.0
GONE: Final = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


def slurm(*argv: str, timeout_s: float = TIMEOUT_S) -> str:
    """Output of a program of Slurm. Raises StackError."""
    if shutil.which(argv[0]) is None:
        raise StackError(f"`{argv[0]}` is not on PATH: run this where Slurm's programs are, such as a login node")
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise StackError(f"`{argv[0]}` gave no answer in {timeout_s:.0f} s: see whether slurmctld runs") from None
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"it ended with code {done.returncode}"
        raise StackError(f"`{' '.join(argv[:2])}` failed: {words}")
    return done.stdout


def state_of(job_id: str) -> tuple[str, str, str]:
    """State, reason and nodes of a job; ("", "", "") once Slurm has forgotten it or it has ended."""
    try:
        lines = slurm("squeue", "--noheader", f"--jobs={job_id}", "--format=%T|%r|%N").splitlines()
    except StackError as error:
        if "Invalid job id" in str(error):
            return "", "", ""
        raise
    found = tuple(part.strip() for part in lines[0].split("|")) if lines else ()
    return (found[0], found[1], found[2]) if len(found) == 3 and found[0] not in GONE else ("", "", "")


def steps_of(job_id: str) -> dict[str, str]:
    """Name → id of each step of a job that runs."""
    lines = slurm("squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%i|%j").splitlines()
    pairs = [line.strip().partition("|") for line in lines]
    return {name.strip(): step.strip() for step, _, name in pairs}


def end_steps(job_id: str, names: Sequence[str], signal: str = "KILL") -> None:
    """Signals the steps with these names, where they run."""
    known = steps_of(job_id)
    for step in (known[name] for name in names if name in known):
        slurm("scancel", f"--signal={signal}", step)


def node_facts(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Node → what `scontrol show node` says of it, such as NodeAddr and State."""
    found = {}
    for line in slurm("scontrol", "--oneliner", "show", "node", ",".join(names)).splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "NodeName" in facts:
            found[facts["NodeName"]] = facts
    return found
