"""Two controllers on one Redis: whichever leads is killed, asked to leave, or suspended in mid-job, and the other one
takes the job over with the curve of an undisturbed run. Every sample is accounted for."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flowfleet.client.client import Client
from flowfleet.local import secrets
from flowfleet.local.stack import MARK
from flowfleet.process.started import StartedProcess
from flowfleet.redis import keys
from flowfleet.redis.client import connect_sync
from services.controller.store.leadership import TTL_S
from tests.e2e.conftest import ROOT, Fleet, assert_accounted
from tests.e2e.test_kills import SAMPLES, STEPS, curve
from tests.forks import start
from tests.waiting import wait_until

pytestmark = pytest.mark.long
MakeJob = Callable[..., dict[str, Any]]


class Second:
    """Another controller besides the stack's own, with the same flags and files."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        stack = fleet.stack
        self._port_file = folder / "port"
        self._log = folder / "controller.log"
        reward = f"ocr={stack.processes['reward-ocr'].address}"
        flags = ["--port", "0", "--port-file", str(self._port_file), "--state-dir", stack.state_dir, "--reward", reward]
        for root in (ROOT, folder.parent):
            flags += ["--data-root", str(root)]
        self._command = [sys.executable, "-m", "services.controller", *flags]
        self._env = {
            **os.environ,
            **secrets.read(Path(stack.state_dir) / "secrets", "controller"),
            MARK: stack.state_dir,
        }
        self._process: StartedProcess | None = None

    def ensure(self) -> str:
        """Its URL."""
        if self._process is None or self._process.poll() is not None:
            self._port_file.unlink(missing_ok=True)
            with self._log.open("ab") as log:
                self._process = start(self._command, env=self._env, output=log.fileno())
            wait_until(self._port_file.exists)
        return f"http://{self._port_file.read_text()}"

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def second(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Second]:
    made = Second(fleet, tmp_path_factory.mktemp("second"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[list[float]]]:
    """Filled by the first test."""
    return {}


def leader(fleet: Fleet) -> int:
    """Pid of the controller that holds the lease; 0 while none does."""
    with connect_sync(fleet.stack.redis_url) as redis:
        held = redis.get(keys.leader())
    return int(json.loads(held)["pid"]) if held else 0


@pytest.mark.parametrize(
    ("number", "phase", "within_s"),
    [
        (signal.SIGTERM, "rollout", TTL_S / 2),
        (signal.SIGKILL, "rollout", TTL_S / 2),
        (signal.SIGKILL, "train", TTL_S / 2),
        (signal.SIGSTOP, "rollout", 1.5 * TTL_S),
    ],
)
def test_the_other_controller_takes_over(
    fleet: Fleet,
    second: Second,
    small_job: MakeJob,
    undisturbed: dict[str, list[list[float]]],
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    phase: str,
    within_s: float,
) -> None:
    spec = small_job(**{"schedule.steps": STEPS, "schedule.save_every": 4})
    if not undisturbed:
        undisturbed["curve"] = curve(fleet, fleet.run(spec))
    urls = [fleet.stack.url, second.ensure()]
    with Client(urls[1], fleet.stack.api_key) as client:  # a follower takes jobs too
        job = client.submit(spec)
        wait_until(lambda: client.job(job.id).progress.step >= 2 and client.job(job.id).progress.phase == phase)
    before = leader(fleet)
    os.kill(before, number)
    began = time.monotonic()
    wait_until(lambda: leader(fleet) not in (0, before))
    seconds = time.monotonic() - began
    if number is signal.SIGSTOP:
        time.sleep(2.0)  # the other one leads by now
        os.kill(before, signal.SIGCONT)
    wait_until(lambda: serves(fleet.stack.url))
    job = fleet.client.wait(job.id, 240)
    assert_accounted(job, STEPS * SAMPLES)
    assert job.results["samples_trained"] == STEPS * SAMPLES
    for ours, theirs in zip(curve(fleet, job), undisturbed["curve"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)
    with capsys.disabled():
        print(f"\n{number.name} in {phase}: another controller leads after {seconds:.2f} s")
    assert seconds < within_s
    urls[1] = second.ensure()
    wait_until(lambda: sorted(gauge(url, fleet.headers) for url in urls) == [0.0, 1.0], 30)
    assert psutil.pid_exists(leader(fleet))


def serves(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def gauge(url: str, headers: dict[str, str]) -> float:
    lines = httpx.get(f"{url}/metrics", headers=headers, timeout=5).text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("flowfleet_controller_leader ")))
