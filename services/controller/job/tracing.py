"""A span a command of a job, below its step's trace, where traces are on (flowfleet/process/traces.py).

A command belongs to the step that it works for: version v is step v - 1's. The step's own span is sent when its update
is done; publishing, saving and validating that version follow it in the same trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from flowfleet.process import traces
from services.controller.job.machine.command import Command, TrainStep
from services.controller.job.machine.state_machine import Machine
from services.controller.waiting import NotYet

if TYPE_CHECKING:
    from flowfleet.process.spans import Tracer


def traced(job_id: str, machine: Machine, command: Command) -> AbstractContextManager[None]:
    """Runs a command inside its span; does nothing while traces are off."""
    tracer = traces.tracer()
    return nullcontext() if tracer is None else _traced(tracer, job_id, machine, command)


@contextmanager
def _traced(tracer: Tracer, job_id: str, machine: Machine, command: Command) -> Iterator[None]:
    step, version = step_of(command, machine), machine.state.version
    ids, batch = traces.StepIds.of(job_id, step), machine.state.batches.get(step)
    own: dict[str, Any] = {"flowfleet.job": job_id, "flowfleet.step": step}
    with tracer.command(ids, type(command).__name__, {**own, **_details(command)}, NotYet):
        yield
    ended = machine.state.trained_at
    if isinstance(command, TrainStep) and step == version < machine.state.version and batch and ended:
        trained = {**own, "flowfleet.samples.trained": batch.num_trained}
        tracer.step(ids, trained, batch.opened_at, ended)


def step_of(command: Command, machine: Machine) -> int:
    """The step whose trace a command is in: its own, or the one that made its version, from 0."""
    if (step := getattr(command, "step", None)) is not None:
        return int(step)
    version = getattr(command, "version", None)
    after = machine.state.version + 1 if version is None else int(version)
    return max(0, min(after, machine.steps) - 1)


def _details(command: Command) -> dict[str, Any]:
    """Attributes of a command's own fields, as in flowfleet.groups."""
    fields = {name: value for name, value in vars(command).items() if name != "step"}
    return {f"flowfleet.{name}": list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
