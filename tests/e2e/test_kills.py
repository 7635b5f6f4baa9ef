"""kill -9 of each process in mid-step: the job ends well, with the curve of an undisturbed run, all accounted for.

The curve is the proof that no step was applied twice or skipped: a step's rewards depend on every update before it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flowfleet.api.jobs import Job
from tests.e2e.conftest import Fleet, assert_accounted
from tests.waiting import wait_until

MakeJob = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.long

STEPS, SAMPLES = 5, 24
NAMES = ("critic/rewards/mean", "actor/loss", "actor/grad_norm")


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[list[float]]]:
    """Filled by the first test: job kind → curve."""
    return {}


@pytest.fixture(scope="module")
def averaged() -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Filled by the first test of an averaged job: what it evaluated at its end."""
    return {}


def kill_controller(fleet: Fleet, job: Job) -> None:
    os.kill(fleet.pid("controller"), signal.SIGKILL)


def kill_rollout(fleet: Fleet, job: Job) -> None:
    os.kill(fleet.pid("rollout-0"), signal.SIGKILL)


def kill_reward(fleet: Fleet, job: Job) -> None:
    os.kill(fleet.pid("reward-ocr"), signal.SIGKILL)


def kill_redis(fleet: Fleet, job: Job) -> None:
    os.kill(fleet.pid("redis"), signal.SIGKILL)


def kill_trainer_rank(fleet: Fleet, job: Job) -> None:
    ranks = [child for child in fleet.trainer(job).children() if "services.trainer" in " ".join(child.cmdline())]
    ranks[0].kill()


def kill_trainer_agent(fleet: Fleet, job: Job) -> None:
    """torchrun itself: its ranks must not live on as orphans."""
    agent = fleet.trainer(job)
    ranks = agent.children(recursive=True)
    agent.kill()
    psutil.wait_procs(ranks, timeout=10)
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("kill", "phase"),
    [
        (kill_controller, "rollout"),
        (kill_controller, "train"),
        (kill_rollout, "rollout"),
        (kill_reward, "rollout"),
        (kill_trainer_rank, "train"),
        (kill_trainer_agent, "rollout"),
        (kill_redis, "rollout"),
        (kill_redis, "train"),
    ],
)
def test_the_job_survives(
    fleet: Fleet,
    small_job: MakeJob,
    undisturbed: dict[str, list[list[float]]],
    kill: Callable[[Fleet, Job], None],
    phase: str,
) -> None:
    spec = small_job(**{"schedule.steps": STEPS, "schedule.save_every": 4})
    if "lora" not in undisturbed:
        undisturbed["lora"] = curve(fleet, fleet.run(spec))
    client = fleet.client
    job = client.submit(spec)
    wait_until(lambda: client.job(job.id).progress.step >= 2 and client.job(job.id).progress.phase == phase)
    kill(fleet, job)
    job = client.wait(job.id, 240)
    assert_accounted(job, STEPS * SAMPLES)
    assert job.results["samples_trained"] == STEPS * SAMPLES
    for ours, theirs in zip(curve(fleet, job), undisturbed["lora"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("kill", [kill_controller, kill_rollout])
def test_an_averaged_job_survives_in_mid_validation(
    fleet: Fleet,
    small_job: MakeJob,
    averaged: dict[str, tuple[float, dict[str, Tensor]]],
    kill: Callable[[Fleet, Job], None],
) -> None:
    """The held-out reward and the exported average are those of an undisturbed run."""
    changes = {"schedule.steps": 3, "trainer.ema": {"decay": 0.9}, "schedule.validation_steps": 40}
    spec = small_job(**changes)
    if not averaged:
        averaged["undisturbed"] = evaluated(fleet.run(spec))
    client = fleet.client
    job = client.submit(spec)
    wait_until(lambda: client.job(job.id).progress.step == 2 and client.job(job.id).progress.phase == "validate")
    kill(fleet, job)
    job = client.wait(job.id, 240)
    assert_accounted(job, 3 * SAMPLES)
    (reward, weights), (undisturbed, expected) = evaluated(job), averaged["undisturbed"]
    assert reward == pytest.approx(undisturbed, abs=1e-3)
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-6)


def evaluated(job: Job) -> tuple[float, dict[str, Tensor]]:
    """The last held-out reward, and the adapter that was exported."""
    return job.results["held_out_reward"], load_file(Path(job.results["model"]) / "pytorch_lora_weights.safetensors")


def curve(fleet: Fleet, job: Job) -> list[list[float]]:
    rows = fleet.metrics(job)
    assert [row.step for row in rows] == list(range(STEPS))
    return [[row.values[name] or 0.0 for name in NAMES] for row in rows]
