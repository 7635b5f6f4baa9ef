"""Answers of the REST API for the live page: jobs in a row each, and a job's course over time."""

from datetime import datetime

from pydantic import Field

from flowfleet.api.answers import Answer, FiniteOrNone
from flowfleet.api.jobs import Desired, JobStatus, Priority, Progress, SweepPart


class Curve(Answer):
    """A metric in few points."""

    stride: int = 1
    """Steps from point to point, from step 0 on."""
    values: tuple[FiniteOrNone, ...] = ()


class Alert(Answer):
    """Something that needs an eye now."""

    name: str
    """Name that the alert has in the chart and the runbook."""
    text: str
    job_id: str = ""
    """The job that it is about; empty for the fleet."""


class JobRow(Answer):
    """A job in a list."""

    id: str
    name: str
    owner: str = ""
    """Holder of the key that submitted it."""
    status: JobStatus
    desired: Desired
    priority: Priority = "normal"
    reason: str = ""
    pool: str
    algorithm: str
    model: str
    """Last part of `model.path`."""
    sweep: SweepPart | None = None
    created_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    progress: Progress = Progress()
    curve: Curve = Curve()
    """Mean training reward."""
    accelerator_hours: dict[str, float] = Field(default={})
    """rollout and trainer → hours of accelerators so far; on CPUs hours of processes."""
    place: int | None = None
    """Jobs before it in the queue; null unless it waits there."""
    starts_in_s: FiniteOrNone = None
    """Seconds until it starts, estimated from what the jobs that run have left."""
    waits: str = ""
    """Why it waits; empty while it does not."""
