"""A new job that continues another: with a job file from its model, without one from its checkpoint as it was."""

from collections.abc import Sequence
from pathlib import Path

from flowfleet.client.client import Client
from flowfleet.job.files import changed_job, prepare_job
from flowfleet.job.migration import today
from flowfleet.job.spec import JobSpec, parse_job


def continued(client: Client, origin: str, file: Path | None = None, changes: Sequence[str] = ()) -> JobSpec:
    """The job to submit. `origin`: ID, or ID@STEP of a kept checkpoint.

    With a file, whose algorithm, rewards and data may be others: its settings, started from the adapter, or for full
    weights from the exported pipeline. Without one: the settings of the job itself, with `trainer.resume` at its newest
    checkpoint; weights, moments and averages continue, the count of steps starts from 0.

    Raises ValueError where there is nothing to continue from, and ApiError as the client's calls do.
    """
    name, _, text = origin.partition("@")
    if text and not text.isdecimal():
        raise ValueError(f"{origin!r}: give the job as ID, or as ID@STEP")
    job = client.find(name)
    if file is not None:
        spec = prepare_job(file, changes, same_machine=client.same_files)
        setting = "model.path" if spec.trainer.mode == "full" else "model.adapter"
        start = f"job:{job.id}@{text}" if text else f"job:{job.id}"
        return prepare_job(file, [*changes, f"{setting}={start}"], same_machine=client.same_files)
    steps = [checkpoint.step for checkpoint in client.checkpoints(job.id)]
    step = int(text) if text else max(steps, default=-1)
    if step not in steps:
        kept = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"job {job.id} has no checkpoint of step {text or 'any'}; kept are: {kept}")
    data = today(job.spec)
    data["model"]["adapter"] = None
    changes = (f"trainer.resume=job:{job.id}@{step}", *changes)
    return parse_job(changed_job(data, changes, [Path.cwd()] if client.same_files else []))
