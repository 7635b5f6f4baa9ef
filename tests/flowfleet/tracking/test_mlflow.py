"""`flowfleet track --mlflow` against a real MLflow server."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowfleet.api.jobs import JobStatus
from flowfleet.client import Client
from flowfleet.local.ports import free_ports
from flowfleet.tracking.place import Place
from tests.flowfleet.conftest import IdleController
from tests.flowfleet.tracking.environments import mlflow_python
from tests.flowfleet.tracking.played_job import PROMPTS, FollowerProcess, PlayedJob, reward, rewards_of
from tests.models_on_disk import write_model

pytestmark = pytest.mark.long


class Server:
    """MLflow's REST API, as a browser would ask it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, method: str, /, **query: Any) -> Any:
        return httpx.get(f"{self.url}/api/2.0/mlflow/{method}", params=query).raise_for_status().json()

    def run(self) -> Any:
        body = {
            "experiment_ids": [
                self.ask("experiments/get-by-name", experiment_name="flowfleet")["experiment"]["experiment_id"]
            ]
        }
        (run,) = httpx.post(f"{self.url}/api/2.0/mlflow/runs/search", json=body).raise_for_status().json()["runs"]
        return run

    def curve(self, run_id: str, name: str) -> list[tuple[int, float]]:
        found = self.ask("metrics/get-history", run_id=run_id, metric_key=name)["metrics"]
        return sorted((int(one["step"]), one["value"]) for one in found)

    def files(self, run_id: str, path: str) -> list[str]:
        return sorted(one["path"] for one in self.ask("artifacts/list", run_id=run_id, path=path).get("files", []))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, (port,) = tmp_path_factory.mktemp("mlflow"), free_ports(1)
    command = [mlflow_python(), "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    stores = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "files")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, *stores], cwd=folder, stdout=log, stderr=log, start_new_session=True)
    found = Server(f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + 180
    try:
        while True:
            try:
                httpx.get(f"{found.url}/health").raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                assert time.monotonic() < deadline, (folder / "log").read_text()[-2000:]
                time.sleep(0.2)
        yield found
    finally:
        process.terminate()
        process.wait(30)


def test_a_run_goes_on_after_kills_and_nothing_is_doubled(
    server: Server, idle_controller: IdleController, api_url: str, redis_url: str, tmp_path: Path
) -> None:
    """The second kill is in the worst moment: MLflow has a step that the place does not have."""
    with Client(api_url) as client:
        job = PlayedJob(redis_url, client, tmp_path)
    folder = tmp_path / "runs/track/mlflow"
    env = {"MLFLOW_TRACKING_URI": server.url}
    follower = FollowerProcess(api_url, job.id, ["--mlflow"], tmp_path, folder, env, mlflow_python())
    job.validate(0)
    job.train(0, 1)
    follower.start()
    follower.wait_for(lambda state: (state.step, state.version) == (1, 0), 120)
    follower.kill()
    place = Place(folder, job.id)
    place.write(place.read().model_copy(update={"event": "", "step": 0, "version": -1}))
    job.train(2)
    write_model(idle_controller.state_dir / "jobs" / job.id / "model", job.id, 3, b"weights")
    job.end(JobStatus.CANCELLED)
    follower.start()
    assert "the job cancelled" in follower.ended(120)

    run = server.run()
    run_id = run["info"]["run_id"]
    assert run["info"]["status"] == "KILLED"
    assert {"key": "seed", "value": "3"} in run["data"]["params"]
    assert server.curve(run_id, "critic/rewards/mean") == [(step, reward(step)) for step in range(3)]
    assert server.curve(run_id, "val/reward") == [(0, reward(0))]
    medians = server.curve(run_id, "histograms/rewards/p50")
    low, high = rewards_of(1)[0], rewards_of(1)[-1]
    assert medians[1][1] == pytest.approx((low + high) / 2, abs=(high - low) / 4)
    assert server.files(run_id, "validation") == ["validation/00000000", "validation/00000000.json"]
    assert len(server.files(run_id, "validation/00000000")) == len(PROMPTS)
    assert "adapter/README.md" in server.files(run_id, "adapter")
