"""Deterministic jobs that share two replicas: each becomes what the same job becomes alone, bit for bit.

SHARED_JOBS sets the number of jobs.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import assert_accounted
from tests.e2e.test_sweep import SAMPLES, outcome

MakeJob = Callable[..., dict[str, Any]]
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

JOBS, STEPS = int(os.environ.get("SHARED_JOBS", "3")), 2
SETTINGS = {
    "schedule.steps": STEPS,
    "schedule.validate_every": STEPS,
    "schedule.max_staleness": 0,
    "trainer.deterministic": True,
}


def test_jobs_that_share_replicas_become_what_they_become_alone(
    make_fleet: Callable[..., Any], small_job: MakeJob
) -> None:
    with make_fleet(replicas=2, trainers=JOBS) as fleet:
        jobs = fleet.client.sweep(small_job(**SETTINGS), {"seed": list(range(JOBS))}, name="shared")
        ended = [fleet.client.wait(job.id, 120.0 * JOBS) for job in jobs]
        log = Path(fleet.stack.state_dir, "logs", "rollout-0.log").read_text()
        assert "shares" in log
        for number, job in enumerate(ended):
            assert_accounted(job, STEPS * SAMPLES)
            alone = fleet.run(small_job(**SETTINGS, seed=number))
            assert outcome(fleet, alone) == outcome(fleet, job)
