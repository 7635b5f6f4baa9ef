"""A deterministic sweep: each of its jobs becomes what the same job becomes alone, bit for bit.

SWEEP_JOBS sets the number of jobs; the jobs run side by side where the fleet has room for them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowfleet.api.jobs import Job
from tests.e2e.conftest import Fleet, assert_accounted

MakeJob = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.long

JOBS, STEPS, SAMPLES = int(os.environ.get("SWEEP_JOBS", "3")), 2, 24
SETTINGS = {"schedule.steps": STEPS, "schedule.validate_every": STEPS, "trainer.deterministic": True}
CURVE = ("critic/rewards/mean", "actor/loss", "actor/grad_norm", "val/reward")


def outcome(fleet: Fleet, job: Job) -> tuple[Any, ...]:
    """Its curve and its weights."""
    rows = [[row.values.get(name) for name in CURVE] for row in fleet.client.metrics(job.id)]
    weights = Path(job.results["model"]) / "pytorch_lora_weights.safetensors"
    return rows, weights.read_bytes()


def test_each_job_of_a_sweep_is_the_same_job_alone(fleet: Fleet, small_job: MakeJob) -> None:
    base = small_job(**SETTINGS)
    rates = [1e-3 * (1 + number) for number in range(JOBS)]
    settings = {"trainer.optimizer.lr": rates, "seed": list(range(JOBS))}
    queued = fleet.client.sweep(base, settings, zipped=True, name="alone")
    assert [job.id for job in fleet.client.sweep(base, settings, zipped=True, name="alone")] == [
        job.id for job in queued
    ]
    ended = [fleet.client.wait(job.id, 240.0 * JOBS) for job in queued]
    outcomes = []
    for number, job in enumerate(ended):
        assert_accounted(job, STEPS * SAMPLES)
        outcomes.append(outcome(fleet, job))
        alone = fleet.run(small_job(**SETTINGS, seed=number, **{"trainer.optimizer.lr": rates[number]}))
        assert outcome(fleet, alone) == outcomes[-1]
    assert len({weights for _, weights in outcomes}) == JOBS
    best = [row.progress.held_out_best for row in fleet.client.sweep_jobs("alone")]
    assert best == [max(row[-1] for row in rows if row[-1] is not None) for rows, _ in outcomes]
