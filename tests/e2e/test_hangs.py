"""SIGSTOP for good of parts of a trainer: each costs the job's `hang_s` and a resume, and nothing of the result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flowfleet.api.jobs import Job
from tests.e2e.conftest import Fleet, assert_accounted
from tests.e2e.test_kills import SAMPLES, evaluated
from tests.waiting import wait_until

HANG_S, STEPS = 5.0, 5
LIMIT_S = 90.0
"""Limit on a resume on a busy machine."""

MakeJob = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.long


def stop(fleet: Fleet, job: Job, rank: int) -> None:
    """Stops a rank; with rank 0 the agent as well."""
    agent = fleet.trainer(job)
    ranks = sorted(agent.children(), key=lambda child: child.create_time())
    os.kill(ranks[rank].pid, signal.SIGSTOP)
    if rank == 0:
        os.kill(agent.pid, signal.SIGSTOP)


def test_ranks_that_stand_still_for_good_cost_a_resume(fleet: Fleet, small_job: MakeJob) -> None:
    spec = small_job(
        **{
            "schedule.steps": STEPS,
            "schedule.save_every": 1,
            "schedule.validate_every": 100,
            "trainer.world_size": 2,
            "trainer.micro_batch_size": 12,
            "timeouts": {"hang_s": HANG_S},
        }
    )
    _, undisturbed = evaluated(fleet.run(spec))
    client = fleet.client
    job = client.submit(spec)
    for rank, step in ((1, 1), (0, 3)):
        wait_until(lambda step=step: client.job(job.id).progress.step >= step)  # type: ignore[misc]
        wait_until(lambda: client.job(job.id).progress.phase == "train")
        stop(fleet, job, rank)
        stopped, before = time.monotonic(), client.job(job.id).progress.step
        wait_until(lambda before=before: client.job(job.id).progress.step > before, LIMIT_S)  # type: ignore[misc]
        print(f"rank {rank}: {time.monotonic() - stopped:.1f} s")
    job = client.wait(job.id, 240)
    assert_accounted(job, STEPS * SAMPLES)
    _, weights = evaluated(job)
    assert weights.keys() == undisturbed.keys()
    assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in weights.items())
    reasons = [event.data["reason"] for event in client.events(job.id) if event.type == "trainer_hung"]
    assert len(reasons) == 2
    assert "rank 1" in reasons[0]
    assert "rank 0" in reasons[1]
