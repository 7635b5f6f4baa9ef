"""OCR v1 → v2 while a job runs: in shadow, promoted, also with either service killed meanwhile.

No step is lost or repeated, each step has one version of the reward from its first sample to its last, and the curve
says at which step it changed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from flowfleet.api.jobs import Job
from flowfleet.api.problems import ApiError
from flowfleet.api.rewards import Rewards
from flowfleet.local.plan import REWARDS_FILE
from flowfleet.local.ports import free_ports
from flowfleet.proto import reward_pb2, reward_pb2_grpc
from tests.e2e.conftest import ROOT, Fleet, assert_accounted
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS, SAMPLES = 14, 12
"""So many that the job cannot end before its shadow is compared and promoted."""
SMALL = {"rollout.prompts_per_step": 2, "schedule.steps": STEPS, "schedule.save_every": 4}
AWAY_S = 1.5


@contextmanager
def second_version(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The soft OCR score as a service of its own, at an address that may be taken up again."""
    settings = {"function": "tests.e2e.signs_v2:soft", "name": "signs", "version": "v2", "batch": "24"}
    settings["params"] = '["crop", "alphanumeric"]'
    flags = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = ["-m", "services.reward", "--scorer", "python", "--port", str(port), "--metrics-port", "0", *flags]
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def started_somewhere() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The second version once it describes itself, and its port; another one where somebody took the first."""
    for _ in range(5):
        (port,) = free_ports(1)
        with second_version(port) as process:
            wait_until(partial(answers, process, port), poll_s=0.2)
            if process.poll() is None:
                yield process, port
                return
    raise AssertionError("the second version does not start")


def answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Whether it describes itself, or has ended."""
    if process.poll() is not None:
        return True
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            found = reward_pb2_grpc.RewardServiceStub(channel).Describe(reward_pb2.DescribeRequest(), timeout=2)
        except grpc.RpcError:
            return False
    return bool(found.version == "v2")


@pytest.mark.parametrize("killed", ["nobody", "old", "new"])
def test_a_reward_is_replaced_through_a_shadow(
    fleet: Fleet, small_job: Callable[..., dict[str, Any]], killed: str
) -> None:
    client = fleet.client
    with ExitStack() as stack:
        process, port = stack.enter_context(started_somewhere())
        listed = Path(fleet.stack.state_dir) / REWARDS_FILE
        listed.write_text(f'ocr-v2 = "127.0.0.1:{port}"\n')
        job = client.submit(small_job(**SMALL))
        params = client.job(job.id).spec["rewards"]["ocr"]["params"]
        shadow = {"ocr2": {"for": "ocr", "service": "ocr-v2", "params": params}}
        wait_until(lambda: client.job(job.id).progress.step >= 1)
        wait_until(lambda: is_taken(fleet, job, shadow), poll_s=0.5)  # the controller may not have read the file yet
        wait_until(lambda: compared(fleet, job) >= SAMPLES, poll_s=0.2)
        before = client.rewards(job.id)
        if killed == "old":
            os.kill(fleet.pid("reward-ocr"), signal.SIGKILL)  # its supervisor starts it again, where it was
        revision = client.change_rewards(job.id, promote=["ocr2"]).revision
        after = client.wait_for_rewards(job.id, revision, 60)
        boundary = after.active.from_step
        assert boundary is not None
        if killed == "new":
            wait_until(lambda: client.job(job.id).progress.step >= boundary)
            process.kill()
            time.sleep(AWAY_S)
            stack.enter_context(second_version(port))
        job = client.wait(job.id, 600)
        check_job(fleet, job, before, boundary)


def is_taken(fleet: Fleet, job: Job, shadow: dict[str, Any]) -> bool:
    try:
        fleet.client.change_rewards(job.id, shadow=shadow)
    except ApiError as error:
        assert_runs(fleet, job)
        if "knows no reward service" not in str(error):
            raise
        return False
    return True


def assert_runs(fleet: Fleet, job: Job) -> None:
    """What is waited for can still happen."""
    now = fleet.client.job(job.id)
    assert not now.ended, f"the job has {now.status} too early: {now.reason}"


def compared(fleet: Fleet, job: Job) -> int:
    assert_runs(fleet, job)
    rewards = fleet.client.rewards(job.id)
    return rewards.comparison["ocr2"].train.samples if "ocr2" in rewards.comparison else 0


def check_job(fleet: Fleet, job: Job, before: Rewards, boundary: int) -> None:
    assert_accounted(job, STEPS * SAMPLES)
    assert job.results["samples_trained"] == STEPS * SAMPLES
    seen = before.comparison["ocr2"].train
    assert (seen.failed, seen.active.versions[0][:6], seen.shadow.versions) == (0, "ocr 1 ", ["signs v2"])
    assert seen.spearman is not None
    assert seen.active.latency_p99_s is not None
    assert seen.shadow.latency_p99_s is not None
    shadowed_from = before.active.from_step
    assert shadowed_from is not None
    assert 0 < shadowed_from < boundary < STEPS

    rows = fleet.metrics(job)
    assert [row.step for row in rows] == list(range(STEPS))
    numbers = [0 if step < shadowed_from else 1 if step < boundary else 2 for step in range(STEPS)]
    assert [row.values["critic/rewards/revision"] for row in rows] == numbers
    assert [revision.from_step for revision in fleet.client.rewards(job.id).history] == [0, shadowed_from, boundary]
    events = [event.data["from_step"] for event in fleet.client.events(job.id) if event.type == "rewards"]
    assert events == [shadowed_from, boundary]

    for purpose in ("train", "validate"):
        versions: dict[int, set[str]] = {}
        for sample in fleet.client.samples(job.id, purpose=purpose):
            versions.setdefault(sample.step, set()).add(sample.versions["ocr"].partition(" (")[0])
        assert versions == {step: {"ocr 1" if step < boundary else "signs v2"} for step in versions}
    counts = Counter(sample.step for sample in fleet.client.samples(job.id))
    assert counts == dict.fromkeys(range(STEPS), SAMPLES)
    shadowed = {sample.step for sample in fleet.client.samples(job.id) if "ocr2" in sample.shadow}
    assert shadowed
    assert shadowed <= set(range(shadowed_from, boundary))
