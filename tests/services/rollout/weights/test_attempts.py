"""A replica takes weights from a job's newest trainer alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.errors import Conflict
from services.rollout.weights.state import MAX_JOBS, Attempts


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5))))
def test_only_the_newest_of_a_job_is_admitted(calls: list[tuple[str, int]]) -> None:
    attempts, newest = Attempts(), {"a": 0, "b": 0}
    for job_id, attempt in calls:
        if 0 < attempt < newest[job_id]:
            with pytest.raises(Conflict, match=f"was replaced by trainer {newest[job_id]}"):
                attempts.admit(job_id, attempt)
        else:
            attempts.admit(job_id, attempt)
            newest[job_id] = max(newest[job_id], attempt)


def test_the_jobs_that_were_served_last_are_remembered() -> None:
    attempts = Attempts()
    for number in range(MAX_JOBS + 1):
        attempts.admit(f"job-{number}", 9)
    attempts.admit("job-0", 1)
    with pytest.raises(Conflict):
        attempts.admit(f"job-{MAX_JOBS}", 1)
