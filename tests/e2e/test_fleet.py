"""More than one of a kind: replicas, trainer ranks, rewards; and sampling ahead of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import assert_accounted

MakeJob = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.long


def test_two_replicas_share_the_work_and_serve_the_same_bits(
    make_fleet: Callable[..., Any], small_job: MakeJob
) -> None:
    with make_fleet(replicas=2) as fleet:
        job = fleet.run(small_job(**{"rollout.batch_size": 6, "trainer.micro_batch_size": 6}))
        assert_accounted(job, 4 * 24)
        replicas = fleet.client.fleet().replicas
        assert len(replicas) == 2
        assert all(replica.samples_total > 0 for replica in replicas)
        assert all(row.values["rollout_corr/ratio_max"] == 1.0 for row in fleet.metrics(job))


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


def test_sampling_ahead_by_one_version(make_fleet: Callable[..., Any], small_job: MakeJob) -> None:
    with make_fleet() as fleet:
        job = fleet.run(small_job(**{"schedule.max_staleness": 1, "schedule.steps": 5}))
        assert_accounted(job, 5 * 24)
        stale = [row.values["training/off_policy/trajectory_staleness/mean"] for row in fleet.metrics(job)]
        assert all(value is not None and 0 <= value <= 1 for value in stale)
        assert max(value or 0 for value in stale) > 0
