"""The queue of jobs, as people see it: a job's place, and in words why it waits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowfleet.api.jobs import Desired, Job, JobStatus
from flowfleet.api.overview import JobRow
from services.controller.store.records import found_no_place, is_unreadable

WEIGHTS = {"low": 1, "normal": 4, "high": 16}
"""How fast a job of each priority ages."""


def score(job: Job | JobRow, epoch: float) -> tuple[float, str]:
    """Key by which the queue is ordered, first come first: the seconds since a job was submitted, times the weight of
    its priority. `epoch`: now, in Unix seconds."""
    age_s = max(0.0, epoch - job.created_at.timestamp())
    return -WEIGHTS[job.priority] * age_s, job.id


def placed(rows: Iterable[JobRow], epoch: float) -> list[JobRow]:
    """Rows of all jobs that have not ended, in their order, each with its place in the queue, and why it waits. The
    next is expected to start when the first of those that run ends, and so on."""
    known = list(rows)
    queue = sorted((row for row in known if _is_queued(row)), key=lambda row: score(row, epoch))
    left = [row.progress.eta_s for row in known if row.status is JobStatus.RUNNING]
    ends = sorted(seconds for seconds in left if seconds is not None)
    queued = {row.id: {"place": place, "starts_in_s": _at(ends, place)} for place, row in enumerate(queue)}
    return [row.model_copy(update={**queued.get(row.id, {}), "waits": _why(row)}) for row in known]


def _at(ends: Sequence[float], place: int) -> float | None:
    return ends[place] if place < len(ends) else None


def _is_queued(row: JobRow) -> bool:
    is_aside = is_unreadable(row.reason) or found_no_place(row.status, row.reason)
    return row.status is JobStatus.QUEUED and not is_aside


def _why(row: JobRow) -> str:
    """Why a job does not advance."""
    match row.status:
        case JobStatus.QUARANTINED:
            return row.reason or "it stopped the controller several times; resume it to try again"
        case JobStatus.QUEUED:
            return row.reason or "the controller takes it up next"
        case JobStatus.PAUSED:
            return row.reason or ("it was paused; resume it" if row.desired is Desired.PAUSED else "it resumes")
    return row.reason
