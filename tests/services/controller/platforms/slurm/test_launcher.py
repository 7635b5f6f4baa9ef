"""The Slurm launcher with stand-ins for Slurm's programs: adoption, and whose fault the end of a trainer is. The real
Slurm is in tests/slurm."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from flowfleet.errors import Unavailable
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.process import commands
from flowfleet.slurm.allocation import Allocation, Node
from services.controller.platforms.slurm import launcher as module
from services.controller.platforms.slurm.launcher import SlurmLauncher
from tests.waiting import until

SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do case $1 in --nodelist=*) nodes=${1#*=};; esac; shift; done
for node in ${nodes//,/ }; do SLURMD_NODENAME=$node SLURM_JOB_ID=7 SLURM_STEP_ID=3 "$@" & done
trap 'kill $(jobs -p)' TERM
wait; wait
"""


@pytest.fixture
def spec() -> JobSpec:
    return parse_job({"model": {"path": "m"}, "rewards": {"ocr": {}}, "data": {"train": "t.txt"}})


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmLauncher:
    programs = {"srun": SRUN, "squeue": "#!/bin/sh\n", "scancel": "#!/bin/sh\n"}
    programs["scontrol"] = f'#!/bin/sh\necho "NodeName=n1 State=$(cat {tmp_path}/state)"\n'
    for name, text in programs.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "state").write_text("ALLOCATED")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(commands, "TRAINER", "tests.services.controller.fake_trainer")
    monkeypatch.setattr(module, "REPORTED_S", 0.2)
    return SlurmLauncher(tmp_path / "fleet", allocation())


def allocation(restarts: int = 0) -> Allocation:
    node = Node(name="n1", address="127.0.0.1", gpus=0, cpus=2)
    return Allocation(job_id="7", restarts=restarts, nodes=(node,), trainer_devices=("n1:0", "n1:1"))


def record(launcher: SlurmLauncher) -> dict[str, str]:
    return json.loads((launcher._state_dir / "trainers" / "job.json").read_text())


async def test_the_next_controller_adopts_the_step(launcher: SlurmLauncher, spec: JobSpec, tmp_path: Path) -> None:
    assert await launcher.admit("job", spec) == ""
    assert await launcher.ensure("job", spec) == "127.0.0.1:4711"
    before = record(launcher)
    second = SlurmLauncher(tmp_path / "fleet", allocation())
    assert await second.ensure("job", spec) == "127.0.0.1:4711"
    assert record(launcher) == before
    assert Path(before["port_file"]).with_name("step.n1").read_text() == "7.3"
    await second.stop("job")
    assert not await launcher.alive("job")


async def test_a_record_of_an_earlier_run_of_the_job_counts_for_nothing(
    launcher: SlurmLauncher, spec: JobSpec, tmp_path: Path
) -> None:
    await launcher.admit("job", spec)
    await launcher.ensure("job", spec)
    later = SlurmLauncher(tmp_path / "fleet", allocation(restarts=1))
    assert not await later.alive("job")
    await launcher.stop("job")


@pytest.mark.parametrize(
    ("files", "state", "own"),
    [
        ({"exit.n1": "1"}, "ALLOCATED", "code 1 on n1"),
        ({"exit.n1": "-9"}, "ALLOCATED", "code -9 on n1"),
        ({"exit.n1": "1", "words": "rank 0: out of memory"}, "ALLOCATED", "rank 0: out of memory"),
        ({"exit.n1": "-15"}, "ALLOCATED", ""),
        ({}, "ALLOCATED", ""),
        ({"exit.n1": "1"}, "DOWN*", ""),
    ],
    ids=["code", "killed", "words", "preempted", "step lost", "node lost"],
)
async def test_only_a_trainers_own_fault_counts(
    launcher: SlurmLauncher, spec: JobSpec, tmp_path: Path, files: dict[str, str], state: str, own: str
) -> None:
    await launcher.admit("job", spec)
    await launcher.ensure("job", spec)
    folder = Path(record(launcher)["port_file"]).parent
    os.killpg(int(record(launcher)["pid"]), signal.SIGKILL)
    await until(lambda: not launcher._runs(launcher._read("job")))  # type: ignore[arg-type]
    for name, text in files.items():
        (folder / name).write_text(text)
    (tmp_path / "state").write_text(state)
    assert await launcher.termination_message("job") == own
    await launcher.stop("job")


async def test_the_end_of_the_fleet_is_not_the_trainers_fault(
    launcher: SlurmLauncher, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "TRAINER", "tests.absent")
    await launcher.admit("job", spec)
    with pytest.raises(RuntimeError, match="while starting"):
        await launcher.ensure("job", spec)
    await launcher.stop("job")
    (tmp_path / "fleet" / "ending").write_text("the job's time limit is near")
    with pytest.raises(Unavailable, match="time limit"):
        await launcher.ensure("job", spec)
