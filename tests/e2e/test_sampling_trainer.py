"""A trainer whose ranks sample for their own job: the curve of rollouts, without rollouts, whatever is killed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from flowfleet.api.jobs import Job
from flowfleet.client.client import Client
from tests.e2e.conftest import Fleet, assert_accounted
from tests.e2e.test_kills import kill_controller, kill_trainer_agent, kill_trainer_rank
from tests.waiting import wait_until

MakeJob = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.long

STEPS, SAMPLES = 4, 24
ONLY = {"trainer.samples": "only", "trainer.world_size": 2, "schedule.steps": STEPS, "schedule.save_every": 3}
IDLE = {
    "trainer.samples": "idle",
    "trainer.deterministic": False,
    "rollout.batch_size": 6,
    "schedule.steps": STEPS,
    "schedule.max_staleness": 1,
}
NAMES = ("critic/rewards/mean", "actor/loss", "actor/grad_norm")


def curve(fleet: Fleet, job: Job) -> list[list[float]]:
    assert_accounted(job, STEPS * SAMPLES)
    rows = fleet.metrics(job)
    assert [row.step for row in rows] == list(range(STEPS))
    return [[row.values[name] or 0.0 for name in NAMES] for row in rows]


def test_the_trainer_alone_repeats_the_curve_of_rollouts_bit_for_bit_whatever_is_killed(
    make_fleet: Callable[..., Any], small_job: MakeJob
) -> None:
    with make_fleet() as fleet:
        by_rollouts = curve(fleet, fleet.run(small_job(**ONLY | {"trainer.samples": "no"})))
    with make_fleet(replicas=0) as fleet:
        client = fleet.client
        job = client.submit(small_job(**ONLY))
        for step, kill in ((1, kill_trainer_rank), (2, kill_controller), (3, kill_trainer_agent)):
            wait_until(partial(is_at, client, job, step))
            made = samples_by_replica(fleet)
            assert step == 1 or set(made) == {f"{job.id}.rank0", f"{job.id}.rank1"}
            kill(fleet, job)
        job = client.wait(job.id, 240)
        assert curve(fleet, job) == by_rollouts
        assert job.results["held_out_reward"] is not None


def samples_by_replica(fleet: Fleet) -> dict[str, int]:
    return {replica.replica_id: replica.samples_total for replica in fleet.client.fleet().replicas}


def is_at(client: Client, job: Job, step: int) -> bool:
    progress = client.job(job.id).progress
    return progress.step >= step and progress.phase == "rollout"


def test_an_idle_trainer_samples_beside_rollouts(make_fleet: Callable[..., Any], small_job: MakeJob) -> None:
    with make_fleet() as fleet:
        job = fleet.client.submit(small_job(**IDLE))
        made: dict[str, int] = {}

        def both() -> bool:
            made.update(samples_by_replica(fleet))
            return fleet.client.job(job.id).status == "succeeded"

        wait_until(both)
        assert_accounted(fleet.client.job(job.id), STEPS * SAMPLES)
        by_trainer = made[f"{job.id}.rank0"]
        assert by_trainer >= 24
        assert sum(made.values()) - by_trainer >= 24
