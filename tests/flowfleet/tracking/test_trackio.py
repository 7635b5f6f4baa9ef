"""`flowfleet track --trackio` on files of this machine; they are read from Trackio's own SQLite file."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from flowfleet.client import Client
from tests.flowfleet.conftest import IdleController
from tests.flowfleet.tracking.environments import trackio_python
from tests.flowfleet.tracking.played_job import FollowerProcess, PlayedJob, reward
from tests.models_on_disk import write_model

pytestmark = pytest.mark.long


def rows(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    (file,) = (path for path in folder.rglob("*.db") if "flowfleet" in path.name)
    with sqlite3.connect(file) as database:
        found = database.execute("select step, metrics from metrics order by id").fetchall()
    return [(step, json.loads(metrics)) for step, metrics in found]


def test_a_run_goes_on_after_a_kill(
    idle_controller: IdleController, api_url: str, redis_url: str, tmp_path: Path
) -> None:
    with Client(api_url) as client:
        job = PlayedJob(redis_url, client, tmp_path)
    env = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    folder = tmp_path / "runs/track/trackio"
    follower = FollowerProcess(api_url, job.id, ["--trackio"], tmp_path, folder, env, trackio_python())
    job.validate(0)
    job.train(0, 1)
    follower.start()
    follower.wait_for(lambda state: (state.step, state.version) == (1, 0))
    follower.kill()
    job.train(2)
    write_model(idle_controller.state_dir / "jobs" / job.id / "model", job.id, 3, b"weights")
    job.end()
    follower.start()
    assert "the job succeeded" in follower.ended()

    found = rows(tmp_path / "trackio")
    trained = [(step, row["critic/rewards/mean"]) for step, row in found if "critic/rewards/mean" in row]
    assert trained == [(step, reward(step)) for step in range(3)]
    assert [step for step, row in found if "val/reward" in row] == [0]
    spread = found[-1][1]["histograms/rewards"]
    assert (spread["_type"], sum(spread["values"] if "values" in spread else spread["histogram"])) == (
        "trackio.histogram",
        8,
    )
    (table,) = [row["pictures"] for _, row in found if "pictures" in row]
    assert [row["prompt"] for row in table["_value"]] == ['a sign that says "K7QX"', "a boat | a moat"]
    (picture, *_) = (tmp_path / "trackio").rglob("*.png")
    assert picture.stat().st_size
    stored = [path for path in (tmp_path / "trackio").rglob("*") if path.is_file()]
    assert any(path.read_bytes() == b"weights" for path in stored), "the adapter is an artifact"
