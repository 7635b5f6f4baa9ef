"""Seeded kills while four jobs share two replicas: each ends with the weights of the same job alone, bit for bit.

KILLS, KILL_STEPS and KILL_SEED choose another length or order.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowfleet.api.jobs import Job
from flowfleet.local.devices import DEVICES_FILE, Devices
from tests.e2e.conftest import Fleet, assert_accounted
from tests.waiting import wait_until

MakeJob = Callable[..., dict[str, Any]]

KILLS, SEED = int(os.environ.get("KILLS", "6")), int(os.environ.get("KILL_SEED", "7"))
JOBS, SAMPLES = 4, 24
STEPS = int(os.environ.get("KILL_STEPS", 4 + 2 * KILLS))
SETTINGS = {"schedule.steps": STEPS, "schedule.validate_every": STEPS, "trainer.deterministic": True}
KINDS = ("controller", "redis", "rollout-0", "rollout-1", "agent", "rank")

pytestmark = [pytest.mark.long, pytest.mark.timeout(600 + 60 * KILLS)]


def places(fleet: Fleet) -> dict[str, tuple[str, ...]]:
    """Job → its trainer's places on this machine."""
    return dict(Devices(Path(fleet.stack.state_dir) / DEVICES_FILE, [str(number) for number in range(JOBS)]).of)


def weights(job: Job) -> bytes:
    return (Path(job.results["model"]) / "pytorch_lora_weights.safetensors").read_bytes()


def kill(fleet: Fleet, kind: str, chance: random.Random) -> str:
    """Kills a process of that kind. Returns which, or "" where none runs now."""
    if kind not in ("agent", "rank"):
        os.kill(fleet.pid(kind), signal.SIGKILL)
        return kind
    records = sorted((Path(fleet.stack.state_dir) / "trainers").glob("*.json"))
    chance.shuffle(records)
    for record in records:
        try:
            agent = psutil.Process(int(json.loads(record.read_text())["pid"]))
            target = agent if kind == "agent" else agent.children()[0]
            target.kill()
        except (psutil.NoSuchProcess, IndexError, FileNotFoundError):
            continue
        return f"{kind} of {record.stem}"
    return ""


def test_killed_jobs_end_as_the_same_jobs_alone(make_fleet: Callable[..., Any], small_job: MakeJob) -> None:
    chance = random.Random(SEED)
    kinds = [KINDS[number % len(KINDS)] for number in range(KILLS)]
    chance.shuffle(kinds)
    with make_fleet(replicas=2, trainers=JOBS) as fleet:
        jobs = fleet.client.sweep(small_job(**SETTINGS), {"seed": list(range(JOBS))}, name="killed")
        ids = {job.id for job in jobs}
        wait_until(lambda: places(fleet).keys() == ids, timeout_s=120)
        killed: list[str] = []
        while kinds:
            time.sleep(chance.uniform(1, 6))
            given = [place for taken in places(fleet).values() for place in taken]
            assert len(given) == len(set(given))
            if struck := kill(fleet, kinds[0], chance):
                killed.append(struck)
                kinds.pop(0)
            assert not fleet.client.job(jobs[-1].id).ended_at, f"too few steps for {KILLS} kills"
        print(killed)
        ended = [fleet.client.wait(job.id, 300 + 30 * KILLS) for job in jobs]
        for job in ended:
            assert_accounted(job, STEPS * SAMPLES)
            assert not job.results["samples_dropped"]
        wait_until(lambda: not places(fleet))
        for number, job in enumerate(ended):
            assert weights(fleet.run(small_job(**SETTINGS, seed=number), 300 + 30 * KILLS)) == weights(job)
