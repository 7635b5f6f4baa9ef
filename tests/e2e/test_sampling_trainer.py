"""A trainer whose ranks sample for their own job: the curve of rollouts, without rollouts, whatever is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flowfleet.client.types import Job
from tests.e2e.conftest import Fleet, assert_accounted
from tests.e2e.test_kills import kill_trainer_agent, kill_trainer_rank
from tests.waiting import wait_until

MakeJob = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.long

STEPS, SAMPLES = 4, 24
ONLY = {"trainer.samples": "only", "schedule.steps": STEPS, "schedule.save_every": 3}
NAMES = ("critic/rewards/mean", "actor/loss", "actor/grad_norm")


@pytest.fixture(scope="module")
def without_rollouts(make_fleet: Callable[..., Any]) -> Iterator[Fleet]:
    with make_fleet(replicas=0) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(make_fleet: Callable[..., Any], small_job: MakeJob) -> list[list[float]]:
    """The curve of the same job with a rollout of one thread in place of the trainer's own samples."""
    with make_fleet() as fleet:
        return curve(fleet, fleet.run(small_job(**ONLY | {"trainer.samples": "no"})))


def curve(fleet: Fleet, job: Job) -> list[list[float]]:
    assert_accounted(job, STEPS * SAMPLES)
    rows = fleet.metrics(job)
    assert [row.step for row in rows] == list(range(STEPS))
    return [[row.values[name] or 0.0 for name in NAMES] for row in rows]


def test_the_trainer_alone_repeats_the_curve_of_rollouts_bit_for_bit(
    without_rollouts: Fleet, small_job: MakeJob, undisturbed: list[list[float]]
) -> None:
    fleet = without_rollouts
    job = fleet.run(small_job(**ONLY))
    assert curve(fleet, job) == undisturbed
    assert job.results["held_out_reward"] is not None


def kill_controller(fleet: Fleet, job: Job) -> None:
    os.kill(fleet.pid("controller"), signal.SIGKILL)


@pytest.mark.parametrize(
    ("kill", "phase"), [(kill_trainer_rank, "rollout"), (kill_trainer_agent, "train"), (kill_controller, "rollout")]
)
def test_kills_change_no_bit_of_the_curve(
    without_rollouts: Fleet,
    small_job: MakeJob,
    undisturbed: list[list[float]],
    kill: Callable[[Fleet, Job], None],
    phase: str,
) -> None:
    fleet, client = without_rollouts, without_rollouts.client
    job = client.submit(small_job(**ONLY))
    wait_until(lambda: client.job(job.id).progress.step >= 2 and client.job(job.id).progress.phase == phase)
    kill(fleet, job)
    assert curve(fleet, client.wait(job.id, 240)) == undisturbed


def test_an_idle_trainer_samples_beside_rollouts(make_fleet: Callable[..., Any], small_job: MakeJob) -> None:
    with make_fleet() as fleet:
        job = fleet.client.submit(small_job(**{"trainer.samples": "idle", "schedule.steps": STEPS}))
        made: dict[str, int] = {}

        def both() -> bool:
            made.update({replica.replica_id: replica.samples_total for replica in fleet.client.fleet().replicas})
            return fleet.client.job(job.id).status == "succeeded"

        wait_until(both)
        assert_accounted(fleet.client.job(job.id), STEPS * SAMPLES)
        by_trainer = made[f"{job.id}.rank0"]
        assert by_trainer >= 24
        assert sum(made.values()) - by_trainer >= 24
