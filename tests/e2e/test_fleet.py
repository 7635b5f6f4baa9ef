"""More than one of a kind: replicas, trainer ranks, rewards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Fleet, assert_accounted
from tests.waiting import wait_until

MakeJob = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def replicas(make_fleet: Callable[..., Any]) -> Iterator[Fleet]:
    """One stack with two replicas."""
    with make_fleet(replicas=2) as running:
        yield running


def test_two_replicas_share_the_work_and_serve_the_same_bits(replicas: Fleet, small_job: MakeJob) -> None:
    job = replicas.run(small_job(**{"rollout.batch_size": 6, "trainer.micro_batch_size": 6}))
    assert_accounted(job, 4 * 24)
    listed = replicas.client.fleet().replicas
    assert len(listed) == 2
    assert all(replica.samples_total > 0 for replica in listed)
    assert all(row.values["rollout_corr/ratio_max"] == 1.0 for row in replicas.metrics(job))


def test_a_replica_killed_during_full_publishing_is_left_out_and_catches_up(
    replicas: Fleet, small_job: MakeJob
) -> None:
    client = replicas.client
    job = client.submit(small_job(**{"trainer.mode": "full", "trainer.optimizer.lr": 1e-4, "schedule.steps": 6}))
    wait_until(lambda: client.job(job.id).progress.step >= 2 and client.job(job.id).progress.phase == "publish")
    os.kill(replicas.pid("rollout-1"), signal.SIGKILL)
    job = client.wait(job.id, 240)
    assert_accounted(job, 6 * 24)


def test_two_trainer_ranks_and_two_rewards(make_fleet: Callable[..., Any], small_job: MakeJob) -> None:
    with make_fleet(rewards=("ocr", "jpeg_compressibility")) as fleet:
        rewards = small_job()["rewards"] | {"jpeg_compressibility": {"weight": 0.1}}
        changes = {"rewards": rewards, "rollout.batch_size": 12, "trainer.micro_batch_size": 12, "trainer.threads": 1}
        alone, both = (fleet.run(small_job(**changes, **{"trainer.world_size": size})) for size in (1, 2))
        for job in (alone, both):
            assert_accounted(job, 4 * 24)
        for one, two in zip(fleet.metrics(alone), fleet.metrics(both), strict=True):
            assert one.values["actor/grad_norm"] == pytest.approx(two.values["actor/grad_norm"], rel=1e-2)
        sample = next(fleet.client.samples(alone.id))
        assert sample.reward == pytest.approx(
            (sample.scores["ocr"] or 0) + 0.1 * (sample.scores["jpeg_compressibility"] or 0)
        )
