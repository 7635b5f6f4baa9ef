"""Bits of checkpoints flip while the trainer is killed: the job ends with the weights of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowfleet.api.jobs import Job
from tests.e2e.conftest import Fleet
from tests.e2e.test_kills import kill_trainer_agent
from tests.faults.job import weights_hash
from tests.services.trainer import damage
from tests.waiting import wait_until

pytestmark = pytest.mark.long

STEPS, SAMPLES = 5, 24


def exported(job: Job) -> str:
    """Hash of the adapter's tensors. The file's own bytes also depend on the order in which they were written."""
    return weights_hash(Path(job.results["model"]))


@pytest.mark.parametrize(("keep_last", "kind"), [(2, "checkpoint_set_aside"), (1, "rewound")])
def test_a_flipped_bit_costs_steps_and_changes_nothing(
    fleet: Fleet, small_job: Callable[..., dict[str, Any]], undisturbed: list[str], keep_last: int, kind: str
) -> None:
    """The only kept checkpoint is damaged, so the job starts again from step 0."""
    settings = {"schedule.steps": STEPS, "schedule.save_every": 1, "trainer.deterministic": True}
    spec = small_job(**settings, **{"schedule.keep_last": keep_last})
    if not undisturbed:
        undisturbed.append(exported(fleet.run(spec)))
    client = fleet.client
    job = client.submit(spec)
    wait_until(lambda: len(list(client.checkpoints(job.id))) == keep_last and client.job(job.id).progress.step == 3)
    trainer = fleet.trainer(job)
    processes = [trainer, *trainer.children(recursive=True)]
    for process in processes:
        process.suspend()  # killed first, it could be back before the damage
    newest = max((Path(fleet.stack.state_dir) / "jobs" / job.id / "checkpoints").glob("step-????????"))
    damage.flip_tensor(newest, "exp_avg.")
    for process in processes:
        process.resume()
    kill_trainer_agent(fleet, job)
    job = client.wait(job.id, 240)
    assert job.status == "succeeded", job.reason
    assert exported(job) == undisturbed[0]
    assert job.results["samples_trained"] == STEPS * SAMPLES
    assert kind in {event.type for event in client.events(job.id)}


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    """Filled by the first test."""
    return []
