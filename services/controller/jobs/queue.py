"""The queue of each rollout pool, as people see it: a job's place, and in words why it waits. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from flowfleet.api.jobs import Desired, JobStatus
from flowfleet.api.overview import JobRow
from services.controller.store.records import found_no_place, is_unreadable


def placed(rows: Iterable[JobRow]) -> list[JobRow]:
    """Rows of all jobs that have not ended, oldest first, with their places: the first of a pool runs, others wait."""
    first: dict[str, JobRow] = {}
    ahead: dict[str, int] = {}
    found = []
    for row in rows:
        place = None
        is_aside = row.status is JobStatus.QUARANTINED or is_unreadable(row.reason)
        is_aside = is_aside or found_no_place(row.status, row.reason)
        if is_aside:
            waits = row.reason or "it stopped the controller several times; resume it to try again"
        elif row.pool in first:
            place, waits = ahead[row.pool], _behind(first[row.pool], ahead[row.pool])
        else:
            first[row.pool], ahead[row.pool] = row, 0
            place, waits = (
                (0, "the controller takes it up next") if row.status is JobStatus.QUEUED else (None, _own(row))
            )
        if not is_aside:
            ahead[row.pool] += 1
        found.append(row.model_copy(update={"place": place, "waits": waits}))
    return found


def _behind(first: JobRow, ahead: int) -> str:
    others = f", and {ahead - 1} more come{'s' * (ahead == 2)} before it" if ahead > 1 else ""
    doing = f"holds it, {first.status}" if first.status is JobStatus.PAUSED else "runs there"
    return f"pool {first.pool} runs one job at a time: {first.name} {doing}{others}"


def _own(row: JobRow) -> str:
    """Why the job that has its pool does not advance."""
    if row.status is JobStatus.PAUSED:
        return row.reason or ("it was paused; resume it" if row.desired is Desired.PAUSED else "it resumes")
    return row.reason
