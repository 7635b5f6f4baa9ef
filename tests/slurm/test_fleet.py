"""A fleet on Slurm: the same adapter as on one machine, through every fault that Slurm has."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowfleet.api.jobs import Job
from flowfleet.client import Client
from flowfleet.job.files import prepare_job
from flowfleet.job.spec import JobSpec
from flowfleet.local.plan import StackOptions
from flowfleet.local.pools import Pool
from flowfleet.local.session import local_stack
from flowfleet.slurm.tools import steps_of
from tests.slurm.pretend import PretendSlurm, processes_on
from tests.waiting import wait_until

SEED = os.environ.get("SLURM_SEED")
"""Seed of ten faults in random order, for a run by hand; unset: each fault once."""
STEPS, RANKS, ROLLOUTS = 10 if SEED is None else 14, 3, 1
SETTINGS = [
    f"schedule.steps={STEPS}",
    "schedule.save_every=1",
    "rollout.prompts_per_step=3",
    "rollout.group_size=4",
    f"trainer.world_size={RANKS}",
    "trainer.threads=1",
    "trainer.deterministic=true",
    "trainer.micro_batch_size=4",
]


def prepare(*changes: str) -> JobSpec:
    spec = prepare_job(Path("tiny_ocr"), [*SETTINGS, *changes], same_machine=True)
    return spec.model_copy(update={"data": spec.data.model_copy(update={"validation": None})})


def flowfleet(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowfleet.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env={**os.environ, **env}, check=False)


def weights(job: Job) -> str:
    assert job.status == "succeeded", job.reason
    return hashlib.sha256((Path(job.results["model"]) / "pytorch_lora_weights.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def spec() -> JobSpec:
    return prepare()


@pytest.fixture(scope="module")
def expected(spec: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the same job on one machine, without Slurm."""
    options = StackOptions(
        state_dir=tmp_path_factory.mktemp("local"), port=0, trainers=RANKS, pools=(Pool(replicas=ROLLOUTS),)
    )
    with local_stack(options) as stack, Client(stack.url) as client:
        return weights(client.wait(client.submit(spec).id, 240))


class Fleet:
    def __init__(self, slurm: PretendSlurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        began = time.monotonic()
        up = flowfleet(
            "slurm", "up", "--nodes", "2", "--gpus-per-node", "2", "--rollouts", str(ROLLOUTS), "--lead", "60",
            "--state-dir", str(folder), "--wait", "120", "--json",
        )  # fmt: skip
        assert up.returncode == 0, up.stderr
        self.job_id = str(json.loads(up.stdout)["job_id"])
        self.took_s = time.monotonic() - began

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        lines = (
            line.removeprefix("export ").partition("=") for line in (self.folder / "client.env").read_text().split("\n")
        )
        env = {name: value.strip("'") for name, _, value in lines}
        with Client(env["FLOWFLEET_URL"], api_key=env["FLOWFLEET_API_KEY"], ca=env["FLOWFLEET_CA"]) as client:
            yield client

    def step(self, job: Job) -> int:
        """The newest trained step; -1 while no controller answers."""
        with contextlib.suppress(Exception), self.client() as client:
            return client.job(job.id).progress.step
        return -1

    def trains(self, job: Job) -> None:
        """Waits until another step has been trained."""
        wait_until(lambda: (now := self.step(job)) >= 0, 120, 0.2)
        before = self.step(job)
        wait_until(lambda: self.step(job) > before, 120, 0.2)

    def trainer_steps(self) -> list[str]:
        return [step for name, step in steps_of(self.job_id).items() if name.startswith("ff-trainer-")]

    def pid(self, name: str) -> int:
        return int(json.loads((self.folder / "stack.json").read_text())["processes"][name]["pid"])

    def serves_again(self, before: str) -> None:
        env = self.folder / "client.env"
        wait_until(lambda: env.exists() and env.read_text() != before, 120, 0.2)


@pytest.fixture(scope="module")
def fleet(slurm: PretendSlurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(slurm, tmp_path_factory.mktemp("shared") / "fleet")
    yield made
    assert flowfleet("slurm", "down", "--state-dir", str(made.folder)).returncode == 0
    wait_until(lambda: not slurm.ask("squeue", "--noheader", f"--jobs={made.job_id}"), 30, 0.2)


def kill_a_rank(fleet: Fleet) -> None:
    ranks = [
        process
        for node in ("n1", "n2")
        for process in processes_on(
            node, lambda words: "services.trainer" in words and "torch.distributed.run" not in words
        )
    ]
    random.Random(0).choice(ranks).kill()


def cancel_the_step(fleet: Fleet) -> None:
    fleet.slurm.ask("scancel", *fleet.trainer_steps())


def kill_the_controller(fleet: Fleet) -> None:
    """Its successor adopts the step."""
    steps = fleet.trainer_steps()
    os.kill(fleet.pid("controller"), signal.SIGKILL)
    wait_until(lambda: fleet.pid("controller"), 10)
    time.sleep(4)
    assert fleet.trainer_steps() == steps
    assert len(steps) == 1


def kill_redis(fleet: Fleet) -> None:
    os.kill(fleet.pid("redis"), signal.SIGKILL)


def restart_slurmctld(fleet: Fleet) -> None:
    fleet.slurm.restart_controller()


def end_the_time(fleet: Fleet) -> None:
    """What Slurm does shortly before the time limit; the node that is drained meanwhile is waited for, in words."""
    before = (fleet.folder / "client.env").read_text()
    fleet.slurm.ask("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    fleet.slurm.ask("scancel", "--signal=USR1", "--batch", fleet.job_id)
    wait_until(lambda: "PENDING" in status(fleet), 60, 0.5)
    fleet.slurm.ask("scontrol", "update", "NodeName=n2", "State=RESUME")
    fleet.serves_again(before)


def kill_the_node(fleet: Fleet) -> None:
    before = (fleet.folder / "client.env").read_text()
    fleet.slurm.kill_node("n2")
    wait_until(lambda: fleet.slurm.states()["n2"].startswith("down"), 60, 0.5)
    fleet.slurm.start_node("n2")
    fleet.serves_again(before)


def status(fleet: Fleet) -> str:
    return flowfleet("slurm", "status", "--state-dir", str(fleet.folder)).stdout


FAULTS = (kill_the_controller, kill_a_rank, cancel_the_step, kill_redis, restart_slurmctld, end_the_time, kill_the_node)


def faults() -> list[Callable[[Fleet], None]]:
    if SEED is None:
        return [*FAULTS]
    chance = random.Random(int(SEED))
    return chance.sample([*FAULTS, *chance.choices(FAULTS, k=3)], k=10)


def test_a_job_through_all_faults_ends_with_the_weights_of_one_machine(
    fleet: Fleet, spec: JobSpec, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second job waits in the queue through all of them, and then runs."""
    small = prepare("trainer.world_size=1", "schedule.steps=1")
    with fleet.client() as client:
        job = client.submit(spec)
        second = client.submit(small)
    began = time.monotonic()
    wait_until(lambda: fleet.step(job) >= 1, 120, 0.2)
    first_s = fleet.took_s + time.monotonic() - began
    named = faults()
    for fault in named:
        fleet.trains(job)
        fault(fleet)
    with fleet.client() as client:
        ended = client.wait(job.id, 240)
        assert weights(ended) == expected
        assert sum(ended.progress.samples_dropped.values()) == 0
        assert client.wait(second.id, 240).status == "succeeded"
    with capsys.disabled():
        print(f"\nslurm up to the first step {first_s:.0f} s; {len(named)} faults, weights {expected[:12]}")
    assert first_s < 90


def test_secrets_are_their_owners_alone(fleet: Fleet) -> None:
    assert fleet.folder.stat().st_mode & 0o077 == 0
    files = [*fleet.folder.rglob("*.env"), *fleet.folder.rglob("*.key"), *fleet.folder.rglob("step.json")]
    assert files
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    words = fleet.slurm.ask("ps", "-eo", "args")
    assert not [line for line in words.splitlines() if "rediss://" in line]
