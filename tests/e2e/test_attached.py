"""A trainer that somebody else starts, by the command that `flowfleet attach` prints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowfleet.api.attach import TOKEN
from flowfleet.api.problems import ApiError
from tests.e2e.conftest import Fleet
from tests.waiting import wait_until

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ranks with no more than the command's own words, and ends them."""
    started: list[subprocess.Popen[str]] = []

    def ranks(fleet: Fleet, job: str, count: int = 2, cwd: Path | None = None, **changed: str) -> subprocess.Popen[str]:
        found = fleet.client.attach(job)
        assert found.command.startswith(f"{TOKEN}={found.token} {'torchrun' if count > 1 else 'python'} ")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FLOWFLEET_")}
        env = clean | {TOKEN: found.token, "OMP_NUM_THREADS": "1"} | changed
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command = [*(torchrun if count > 1 else ()), "-m", "services.trainer", "--controller", fleet.stack.url]
        made = subprocess.Popen(
            [sys.executable, *command], env=env, cwd=cwd, text=True, stdout=-1, stderr=subprocess.STDOUT
        )
        started.append(made)
        return made

    yield ranks
    for made in started:
        made.kill()
        made.communicate()


@pytest.mark.long
def test_ranks_of_a_torchrun_train_the_same_weights_and_the_next_attempt_resumes(
    fleet: Fleet, small_job: Callable[..., dict[str, Any]], start: Start
) -> None:
    usual = {"trainer.world_size": 2, "trainer.deterministic": True, "schedule.save_every": 1}
    plain = fleet.run(small_job(**usual))
    job = fleet.client.submit(small_job(**usual, **{"trainer.launcher": "attach"})).id
    wait_until(lambda: "waits for 2 ranks of attempt 1" in fleet.client.job(job).reason)
    assert f"`flowfleet attach {job}` prints their command" in fleet.client.job(job).reason
    first = start(fleet, job)
    wait_until(lambda: fleet.client.job(job).progress.step >= 1, 90)
    fleet.client.pause(job)  # it does not end meanwhile
    second = start(fleet, job)  # a set too many
    said, _ = second.communicate(timeout=60)
    assert second.returncode
    assert f"job {job} has ranks already: attempt 1, with 2 ranks. End them before you start others" in said
    os.kill(first.pid, signal.SIGKILL)  # its ranks end with it
    first.wait()
    fleet.client.resume(job)
    wait_until(lambda: "waits for 2 ranks of attempt 2" in fleet.client.job(job).reason)
    third = start(fleet, job)
    ended = fleet.client.wait(job, 240)
    assert ended.status == "succeeded", ended.reason
    third.communicate(timeout=60)
    assert third.returncode == 0
    weights = [(Path(one.results["model"]) / "pytorch_lora_weights.safetensors").read_bytes() for one in (plain, ended)]
    assert weights[0] == weights[1]


def test_ranks_that_cannot_join_hear_why(
    fleet: Fleet, small_job: Callable[..., dict[str, Any]], start: Start, tmp_path: Path
) -> None:
    one = small_job(**{"trainer.launcher": "attach"})
    job = fleet.client.submit(one).id
    wait_until(lambda: "waits for 1 rank of attempt 1" in fleet.client.job(job).reason)
    token = fleet.client.attach(job).token

    def refused(count: int, **changed: Any) -> str:
        process = start(fleet, job, count, **changed)
        said, _ = process.communicate(timeout=180)
        assert process.returncode
        return said

    wrong = "this is not the token of a job of this controller: `flowfleet attach ID` prints it"
    assert wrong in refused(1, **{TOKEN: token[:-1] + "x"})
    unknown = f"{job[:-1]}{'0' if job[-1] != '0' else '1'}"
    assert wrong in refused(1, **{TOKEN: f"{unknown}{token[len(job) :]}"})
    assert f"--controller needs the token of a job in {TOKEN}" in refused(1, **{TOKEN: ""})
    size = f"this is rank 1 of 2, but job {job} has trainer.world_size = 1: start as many ranks"
    assert size in refused(1, RANK="1", WORLD_SIZE="2")
    older = tmp_path / "flowfleet-0.0.1.dist-info"
    older.mkdir()
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: flowfleet\nVersion: 0.0.1\n")
    # From its folder: in a checkout, the installation's own flowfleet.egg-info would be found before it.
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    older_said = refused(1, cwd=tmp_path, PYTHONPATH=os.pathsep.join(paths))
    assert "Flowfleet 0.0.1, older than the controller's" in older_said
    fleet.client.cancel(job)
    fleet.client.wait(job)
    with pytest.raises(ApiError, match=f"job {job} has ended: cancelled"):
        fleet.client.attach(job)
    plain = fleet.client.submit(small_job()).id
    with pytest.raises(ApiError, match=r'set trainer\.launcher = "attach" in its file'):
        fleet.client.attach(plain)
    fleet.client.cancel(plain)
    fleet.client.wait(plain)
