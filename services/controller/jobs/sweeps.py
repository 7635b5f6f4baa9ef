"""Jobs of sweeps that wait for others of their sweep. Pure."""

from collections import Counter
from collections.abc import Iterable

from flowfleet.api.jobs import JobStatus
from services.controller.store.records import JobRecord, found_no_place


def held_back(records: Iterable[JobRecord]) -> set[str]:
    """Queued jobs that their sweeps' `at_once` keeps from running now. `records`: all jobs that have not ended, in the
    order in which they are taken up. Starting and running jobs use their sweep's places, paused ones do not. Jobs whose
    trainers found no place get what other queued ones leave."""
    sweeps = [(one, one.sweep) for one in records if one.sweep is not None and not one.is_unreadable]
    taken = Counter(part.name for one, part in sweeps if one.status in (JobStatus.STARTING, JobStatus.RUNNING))
    queued = [(one, part) for one, part in sweeps if one.status is JobStatus.QUEUED]
    held = set()
    for record, part in sorted(queued, key=lambda pair: found_no_place(pair[0].status, pair[0].reason)):
        if part.at_once is not None and taken[part.name] >= part.at_once:
            held.add(record.id)
        else:
            taken[part.name] += 1
    return held
