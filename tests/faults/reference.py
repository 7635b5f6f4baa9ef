"""The job of a chaos run without faults, given the same drops: what the weights are compared with."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from flowfleet.client.client import Client
from flowfleet.job.spec import JobSpec
from flowfleet.local.stack import StackError
from tests.faults.job import weights_hash
from tests.faults.stack import chaos_stack
from tests.faults.tools.clocks import Clocks

Say = Callable[[str], None]


@contextlib.contextmanager
def references(
    directory: Path, spec: JobSpec, say: Say, stop: threading.Event
) -> Iterator[Callable[[Mapping[str, str]], Future[tuple[str, float]]]]:
    """Starts references in a thread; they end with the block."""
    with ThreadPoolExecutor(1, "reference") as pool:
        try:
            yield lambda poison: pool.submit(_reference, directory / "reference", spec, dict(poison), say, stop)
        finally:
            stop.set()


def _reference(
    directory: Path, spec: JobSpec, poison: Mapping[str, str], say: Say, stop: threading.Event
) -> tuple[str, float]:
    """Hash of the weights of a run without faults, and its seconds. Raises StackError where it does not succeed."""
    with (
        chaos_stack(directory, spec, poison, Clocks(directory, None)) as chaos,
        Client(chaos.stack.url) as client,
    ):
        started = time.monotonic()
        job = client.submit(spec)
        while not (job := client.job(job.id)).ended:
            if job.status == "paused":
                raise StackError(f"the reference paused: {job.reason}")
            if stop.wait(0.5):
                raise StackError("the reference was stopped")
        seconds = time.monotonic() - started
        if job.status != "succeeded":
            raise StackError(f"the reference {job.status}: {job.reason}; its logs are in {chaos.state.logs}")
        say(f"reference: {spec.schedule.steps} steps in {seconds:.0f} s, {len(poison)} samples dropped")
        return weights_hash(Path(job.results["model"])), seconds


def result_of(reference: Future[tuple[str, float]]) -> tuple[str, float]:
    """Waits so that signals are heard."""
    while not reference.done():
        time.sleep(0.1)
    return reference.result()
