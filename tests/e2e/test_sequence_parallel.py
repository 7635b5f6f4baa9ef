"""A job whose rollout shares every film between two processes loses the second one by kill -9, and ends as if it had
not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from flowfleet.api.jobs import Job
from flowfleet.job.spec import read_job_file
from tests.e2e.conftest import ROOT, Fleet, assert_accounted
from tests.waiting import wait_until

pytestmark = pytest.mark.long

STEPS, SAMPLES = 4, 16
NAMES = ("critic/rewards/mean", "actor/loss", "actor/grad_norm")


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any]) -> Iterator[Fleet]:
    model = str(ROOT / "recipes/tiny_video/model")
    with make_fleet(model=model, rewards=("motion",), sequence_parallel_size=2) as running:
        yield running


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_killed_follower_costs_a_restart_of_its_rollout(fleet: Fleet, mode: str) -> None:
    undisturbed = fleet.run(films(mode))
    client = fleet.client
    job = client.submit(films(mode))
    wait_until(lambda: client.job(job.id).progress.step >= 1 and client.job(job.id).progress.phase == "rollout")
    rollout = fleet.pid("rollout-0")
    (follower,) = [child for child in psutil.Process(rollout).children() if "follower" in " ".join(child.cmdline())]
    follower.kill()
    job = client.wait(job.id, 240)
    assert fleet.pid("rollout-0") != rollout
    assert_accounted(job, STEPS * SAMPLES)
    assert job.results["samples_trained"] == STEPS * SAMPLES
    for ours, theirs in zip(curve(fleet, job), curve(fleet, undisturbed), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)


def films(mode: str) -> dict[str, Any]:
    job = read_job_file(ROOT / "recipes/tiny_video.toml")
    job["model"]["path"] = str(ROOT / "recipes/tiny_video/model")
    job["data"] = {"train": str(ROOT / "recipes/tiny_video/prompts/train.txt")}
    job["rollout"] |= {"prompts_per_step": 2, "group_size": 8, "batch_size": 8}
    job["trainer"] |= {"mode": mode, "micro_batch_size": 8, "threads": 1, "deterministic": False}
    if mode == "full":
        job["trainer"].pop("lora")
    job["schedule"] = {"steps": STEPS, "save_every": 2}
    return job


def curve(fleet: Fleet, job: Job) -> list[list[float | None]]:
    return [[row.values[name] for name in NAMES] for row in fleet.metrics(job)]
