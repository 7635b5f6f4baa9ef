"""The trainer of a demo's job inside `ray job submit`, on a Ray cluster of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowfleet.api.attach import TOKEN
from flowfleet.redis.server import free_port
from tests.e2e.conftest import Fleet
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
RAY = Path(os.environ.get("FLOWFLEET_RAY") or ROOT / ".venv-ray").resolve() / "bin"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (RAY / "ray").exists(), reason="needs Ray: run tests/packages"),
]


@pytest.fixture
def cluster() -> Iterator[str]:
    """Address of the dashboard of a Ray cluster with two CPUs."""
    port, dashboard, client = free_port(), free_port(), free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("FLOWFLEET_")}
    env |= {"PATH": f"{RAY}:{env['PATH']}", "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    ports = [f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
    flags = ["--head", "--num-cpus=2", "--object-store-memory=100000000", *ports, "--block"]
    with tempfile.TemporaryDirectory(prefix="ray") as folder, (Path(folder) / "log").open("wb") as log:
        command = [str(RAY / "ray"), "start", *flags, f"--temp-dir={folder}"]
        head = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        wait_until(lambda: _answers(f"http://127.0.0.1:{dashboard}/api/version"), 120)
        yield f"http://127.0.0.1:{dashboard}"
        head.terminate()
        head.wait(60)
        print((Path(folder) / "log").read_text()[-3000:])


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.TransportError:
        return False


def submit(cluster: str, env: dict[str, str], command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as a job of Ray, to its end."""
    runtime = json.dumps({"env_vars": env})
    words = ["ray", "job", "submit", f"--address={cluster}", f"--runtime-env-json={runtime}", "--", *command.split()]
    given = {**os.environ, "PATH": f"{RAY}:/usr/bin:/bin"}
    return subprocess.run([RAY / words[0], *words[1:]], capture_output=True, text=True, timeout=300, env=given)


def test_a_job_of_ray_trains_the_weights_of_the_local_trainer(
    fleet: Fleet, small_job: Callable[..., dict[str, Any]], cluster: str
) -> None:
    usual = {"trainer.deterministic": True}
    plain = fleet.run(small_job(**usual))
    job = fleet.client.submit(small_job(**usual, **{"trainer.launcher": "attach"})).id
    token = fleet.client.attach(job).token
    command = f"{RAY}/python -m services.trainer --controller {fleet.stack.url}"
    done = submit(cluster, {TOKEN: token, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, command)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = fleet.client.wait(job, 60)
    assert ended.status == "succeeded", ended.reason
    weights = [(Path(one.results["model"]) / "pytorch_lora_weights.safetensors").read_bytes() for one in (plain, ended)]
    assert weights[0] == weights[1]
