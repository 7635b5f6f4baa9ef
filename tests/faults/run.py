"""A job under seeded faults, and the same job undisturbed with the same samples dropped."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowfleet.api.jobs import Job
from flowfleet.client import Client
from flowfleet.job.spec import JobSpec
from tests.faults.account import Samples, account
from tests.faults.injector import Entry, Injector
from tests.faults.job import weights_hash
from tests.faults.schedule import Fault, poisons
from tests.faults.stack import chaos_stack
from tests.faults.targets import Targets
from tests.faults.tools.clocks import LIBRARY, Clocks
from tests.faults.tools.disk import SmallDisk
from tests.faults.watch import Watch

END_S = 600.0
"""Time allowed for the steps after the last fault, or for a whole undisturbed run."""


@dataclass(frozen=True)
class Outcome:
    """The end of a job under faults."""

    job: Job
    entries: list[Entry]
    samples: Samples
    weights: str
    """SHA-256 of the exported weights."""


def possible(kinds: Sequence[str], *, has_clocks: bool, has_disk: bool) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns the kinds that this machine can do, and why it cannot do the others."""
    reasons = {}
    if not has_clocks:
        reasons["skew-clock"] = f"there is no libfaketime: install the package faketime, or set {LIBRARY}"
    if not has_disk:
        reasons["full-disk"] = "this process may not mount a small disk: run it as root"
    skipped = {kind: why for kind, why in reasons.items() if kind in kinds}
    return tuple(kind for kind in kinds if kind not in skipped), skipped


def can_mount(directory: Path) -> bool:
    """Mounts a small disk and takes it away again; False where this process may not."""
    with SmallDisk(directory) as disk:
        return disk.mounted


def run_under_faults(directory: Path, spec: JobSpec, schedule: Sequence[Fault], library: Path | None) -> Outcome:
    """Runs the job on a stack of its own while the schedule strikes. Raises Stuck where it makes no progress."""
    started = time.monotonic()
    clocks = Clocks(directory / "clocks", library)
    with (
        chaos_stack(directory / "stack", spec, poisons(schedule), clocks) as chaos,
        Client(chaos.stack.url) as client,
    ):
        job = client.submit(spec)
        print(f"job {job.id} on {chaos.stack.url}; logs are in {chaos.state.logs}")
        watch = Watch(chaos.stack.url, job.id, {"X-API-Key": chaos.stack.api_key})
        targets = Targets(chaos, watch, job.id, spec)
        targets.start()
        try:
            entries = Injector(targets, client, started).run(schedule)
            watch.until(lambda sight: sight.ended, END_S)
        finally:
            targets.close()
            watch.close()
        job = client.job(job.id)
        assert job.status == "succeeded", f"the job is {job.status}: {job.reason}"
        struck = [entry for entry in entries if entry.kind == "poison-reward" and entry.counted]
        injected = tuple(sorted(entry.data["sample"] for entry in struck))
        samples = account(spec, job, client.samples(job.id, order="oldest"), targets.trained, injected)
        return Outcome(job, entries, samples, weights_hash(Path(job.results["model"])))


def undisturbed_weights(directory: Path, spec: JobSpec, poison: Mapping[str, str]) -> str:
    """Returns the SHA-256 of the weights of the job without faults, in which the reward poisons these samples."""
    with chaos_stack(directory, spec, poison, Clocks(directory, None)) as chaos, Client(chaos.stack.url) as client:
        job = client.wait(client.submit(spec).id, END_S)
        assert job.status == "succeeded", f"the undisturbed job is {job.status}: {job.reason}"
        return weights_hash(Path(job.results["model"]))
