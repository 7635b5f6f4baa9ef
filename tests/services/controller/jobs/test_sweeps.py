"""Which queued jobs wait for others of their sweep."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from flowfleet.api.jobs import Desired, JobStatus, SweepPart
from services.controller.jobs.sweeps import held_back
from services.controller.store.records import NO_PLACE, UNREADABLE, JobRecord

AT_ONCE = {"few": 1, "some": 3, "free": None}
STATUSES = [status for status in JobStatus if not status.terminal]
JOBS = st.lists(
    st.tuples(st.sampled_from(["", *AT_ONCE]), st.sampled_from(STATUSES), st.sampled_from(["", NO_PLACE, UNREADABLE]))
)


def record(number: int, sweep: str, status: str, reason: str = "") -> JobRecord:
    return JobRecord(
        id=str(number),
        name="job",
        status=JobStatus(status),
        desired=Desired.RUNNING,
        reason=reason,
        created_at=datetime.now(UTC),
        sweep=SweepPart(name=sweep, at_once=AT_ONCE[sweep]) if sweep else None,
    )


def test_the_first_queued_jobs_get_the_places_that_are_left() -> None:
    jobs = [record(n, "some", status) for n, status in enumerate(["running", "paused", *["queued"] * 4])]
    assert held_back(jobs) == {"4", "5"}


def test_a_job_without_a_place_for_its_trainer_lets_others_of_its_sweep_go_ahead() -> None:
    assert held_back([record(0, "few", "queued", f"{NO_PLACE} x"), record(1, "few", "queued")]) == {"0"}
    assert held_back([record(0, "few", "queued", f"{NO_PLACE} x"), record(1, "few", "running")]) == {"0"}
    assert held_back([record(0, "few", "queued", f"{NO_PLACE} x")]) == set()


@given(JOBS)
def test_no_sweep_has_more_at_once_and_none_fewer_than_it_may(jobs: list[tuple[str, JobStatus, str]]) -> None:
    records = [record(number, *job) for number, job in enumerate(jobs)]
    held = held_back(records)
    by_id = {one.id: one for one in records}
    assert all(by_id[job].status is JobStatus.QUEUED and by_id[job].sweep for job in held)
    able = [one for one in records if one.sweep is not None and not one.is_unreadable]
    at_work = Counter(one.sweep.name for one in able if one.sweep and one.status in ("starting", "running"))
    freed = Counter(one.sweep.name for one in able if one.sweep and one.status == "queued" and one.id not in held)
    waiting = Counter(one.sweep.name for one in able if one.sweep and one.id in held)
    for name, most in AT_ONCE.items():
        if most is None:
            assert not waiting[name]
        elif freed[name]:
            assert at_work[name] + freed[name] <= most
        if waiting[name] and most is not None:
            assert at_work[name] + freed[name] >= most
