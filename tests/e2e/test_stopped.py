"""Processes that are stopped for good, and blobs that vanish or change: the job ends as an undisturbed one does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import redis

from flowfleet.api.jobs import Job
from tests.e2e.conftest import Fleet
from tests.waiting import wait_until

MakeJob = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.long

HANG_S = 12.0
STEPS, SAMPLES = 4, 24
JOB = {"schedule.steps": STEPS, "schedule.validate_every": 100}
NAMES = ("actor/loss", "actor/grad_norm", "critic/rewards/mean")


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any]) -> Iterator[Fleet]:
    with make_fleet(hang_s=HANG_S) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet, small_job: MakeJob) -> list[list[float]]:
    return curve(fleet, fleet.run(small_job(**JOB)))


def curve(fleet: Fleet, job: Job) -> list[list[float]]:
    return [[row.values[name] or 0.0 for name in NAMES] for row in fleet.metrics(job)]


def reached(fleet: Fleet, job: Job, step: int) -> None:
    """Sampling of the step, or of a later one."""

    def samples() -> bool:
        now = fleet.client.job(job.id).progress
        return now.step >= step and now.phase == "rollout"

    wait_until(samples, poll_s=0.02)


def assert_as_undisturbed(fleet: Fleet, job: Job, undisturbed: list[list[float]]) -> None:
    assert job.status == "succeeded", job.reason
    assert job.results["samples_trained"] == STEPS * SAMPLES
    assert job.results["samples_dropped"] == {}
    for ours, theirs in zip(curve(fleet, job), undisturbed, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)


def test_processes_that_are_stopped_for_good_are_replaced_in_time(
    fleet: Fleet, small_job: MakeJob, undisturbed: list[list[float]]
) -> None:
    """One after the other, each in a step of its own."""
    job = fleet.client.submit(small_job(**JOB))
    for step, name in enumerate(("rollout-0", "reward-ocr", "controller"), 1):
        reached(fleet, job, step)
        stopped = fleet.pid(name)
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        while psutil.pid_exists(stopped):
            assert time.monotonic() - began < HANG_S, f"{name} is still there"
            time.sleep(0.1)
        wait_until(lambda name=name, stopped=stopped: fleet.pid(name) != stopped)  # type: ignore[misc]
    assert_as_undisturbed(fleet, fleet.client.wait(job.id, 240), undisturbed)


def test_blobs_that_vanish_or_change_are_made_again(
    fleet: Fleet, small_job: MakeJob, undisturbed: list[list[float]]
) -> None:
    client: Any = redis.Redis.from_url(fleet.stack.redis_url)
    job = fleet.client.submit(small_job(**JOB))
    damaged = 0
    while fleet.client.job(job.id).status not in ("succeeded", "failed") and damaged < 6:
        for kind in ("trajectory", "media"):
            for key in list(client.scan_iter(match=f"ff:{job.id}:blob:{kind}:1:*", count=1000))[:2]:
                data = client.get(key)
                if data and damaged % 2:
                    client.delete(key)
                elif data:
                    client.set(key, bytes([data[0] ^ 1]) + data[1:], keepttl=True)
                damaged += 1
        time.sleep(0.02)
    job = fleet.client.wait(job.id, 240)
    assert damaged >= 4
    assert any(event.type == "lost" for event in fleet.client.events(job.id))
    assert_as_undisturbed(fleet, job, undisturbed)
