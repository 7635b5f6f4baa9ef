"""A policy that learns from the adapters of ended jobs, without any reward; and one that rewards watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowfleet.api.jobs import Job
from tests.e2e.conftest import Fleet, assert_accounted

MakeJob = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def teacher(fleet: Fleet, small_job: MakeJob) -> Job:
    """Trained by Flow-GRPO for four steps."""
    return fleet.run(small_job())


def student(small_job: MakeJob, **changes: Any) -> dict[str, Any]:
    job = small_job(**{"rollout.group_size": 2, "rollout.batch_size": 4, "trainer.micro_batch_size": 4})
    job |= {"algorithm": {"name": "diffusion_opd"}, "rewards": {}}
    job["data"].pop("validation")
    for name, value in changes.items():
        table, key = name.split(".")
        job[table][key] = value
    return job


@pytest.mark.long
def test_a_job_without_a_reward_comes_closer_to_its_teachers(fleet: Fleet, teacher: Job, small_job: MakeJob) -> None:
    """One teacher is the job's model, the other its checkpoint after two steps; each has a source of its own."""
    train = small_job()["data"]["train"]
    job = student(small_job)
    job["data"] = {"sources": [{"name": name, "path": train} for name in ("late", "early")]}
    job["algorithm"]["teachers"] = {
        "late": {"adapter": f"job:{teacher.id}", "sources": ["late"]},
        "early": {"adapter": f"job:{teacher.id}@2", "sources": ["early"]},
    }
    ended = fleet.run(job)
    assert_accounted(ended, 4 * 8)
    assert ended.results["samples_dropped"] == {}
    kls = [row.values["actor/teacher_kl"] or 0.0 for row in fleet.metrics(ended)]
    assert kls[0] > kls[-1] > 0
    assert all(row.values["critic/advantages/max"] == 0 for row in fleet.metrics(ended))


@pytest.mark.long
def test_rewards_may_watch(fleet: Fleet, teacher: Job, small_job: MakeJob) -> None:
    job = student(small_job)
    job["data"]["validation"] = small_job()["data"]["validation"]
    job["rewards"] = small_job()["rewards"]
    job["algorithm"]["teachers"] = {"only": {"adapter": f"job:{teacher.id}"}}
    ended = fleet.run(job)
    assert_accounted(ended, 4 * 8)
    assert ended.results["held_out_reward"] is not None
    assert all(row.values["critic/rewards/mean"] is not None for row in fleet.metrics(ended))
