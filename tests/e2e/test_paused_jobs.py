"""A paused job gives way to the next one, and comes back before those that wait, with its curve as undisturbed."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flowfleet.api.jobs import Job
from tests.e2e.conftest import Fleet, assert_accounted
from tests.waiting import wait_until

MakeJob = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.long

STEPS, SAMPLES = 6, 24
SETTINGS = {"trainer.deterministic": True, "schedule.validate_every": STEPS, "pause.release_s": 0}


def served_at(fleet: Fleet, job: Job) -> datetime:
    """When the job's trainer was first configured, by its log."""
    log = Path(fleet.stack.state_dir) / "jobs" / job.id / "logs/trainer.log"
    line = next(line for line in log.read_text().splitlines() if "configured at version" in line)
    return datetime.fromisoformat(json.loads(line)["ts"])


def test_a_paused_job_gives_way_and_comes_back(make_fleet: Callable[..., Any], small_job: MakeJob) -> None:
    with make_fleet(trainers=1) as fleet:
        client = fleet.client
        alone = fleet.run(small_job(**SETTINGS, **{"schedule.steps": STEPS}))
        paused = client.submit(small_job(**SETTINGS, **{"schedule.steps": STEPS}))
        second, third = (client.submit(small_job(**SETTINGS, **{"schedule.steps": 8}, seed=seed)) for seed in (1, 2))
        wait_until(lambda: client.job(paused.id).progress.step >= 2)
        client.pause(paused.id)
        wait_until(lambda: client.job(second.id).progress.samples_sampled > 0)
        waited_s = (datetime.now(UTC) - served_at(fleet, second)).total_seconds()
        print(f"first sample {waited_s:.2f} s after the trainer serves")
        assert waited_s < 30  # nothing of the paused job is waited for
        client.resume(paused.id)
        ended = [client.wait(job.id) for job in (second, paused, third)]
        for job in ended:
            assert_accounted(job, job.progress.steps * SAMPLES)
        assert ended == sorted(ended, key=lambda job: job.ended_at)
        weights = [Path(job.results["model"]) / "pytorch_lora_weights.safetensors" for job in (alone, ended[1])]
        assert weights[0].read_bytes() == weights[1].read_bytes()
