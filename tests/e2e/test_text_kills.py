"""kill -9 of each process in mid-step of a job that writes text: the curve is that of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowfleet.api.jobs import Job
from tests.e2e import test_text as text
from tests.e2e.conftest import Fleet, assert_accounted
from tests.e2e.test_kills import curve, kill_controller, kill_redis, kill_rollout, kill_trainer_rank
from tests.waiting import wait_until

pytestmark = pytest.mark.long
model, reward, fleet, text_job = text.model, text.reward, text.fleet, text.text_job


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet, text_job: dict[str, Any]) -> list[list[float]]:
    return curve(fleet, fleet.run(text_job))


@pytest.mark.parametrize(
    ("kill", "phase"),
    [(kill_controller, "rollout"), (kill_rollout, "rollout"), (kill_trainer_rank, "train"), (kill_redis, "rollout")],
)
def test_a_job_survives(
    fleet: Fleet,
    text_job: dict[str, Any],
    undisturbed: list[list[float]],
    kill: Callable[[Fleet, Job], None],
    phase: str,
) -> None:
    client = fleet.client
    job = client.submit(text_job)
    wait_until(lambda: client.job(job.id).progress.step >= 2 and client.job(job.id).progress.phase == phase)
    kill(fleet, job)
    job = client.wait(job.id, 240)
    assert_accounted(job, text.STEPS * text.SAMPLES)
    for ours, theirs in zip(curve(fleet, job), undisturbed, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)
