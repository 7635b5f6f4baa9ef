"""`--json`: every command prints JSON and nothing else, against a real controller process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from flowfleet.api.jobs import JobStatus
from flowfleet.cli import main as cli
from flowfleet.client.archive import Archive
from flowfleet.client.client import Client
from services.controller.store.store import Store
from tests.flowfleet.cli.test_main import options_of
from tests.flowfleet.idle_controller import in_store, job_settings

ELSEWHERE = {
    "eval",
    "try-reward",
    "doctor",
    "up",
    "demo",
    "track",
    "export",
    "push",
    "check-reward",
    "check-model",
    "plan",
    "pools add",
    "pools remove",
    "sweep export",
    "attach",
    "profile",
    "slurm up",
    "slurm down",
    "slurm status",
    "slurm logs",
} | {f"rewards {name}" for name in ("shadow", "promote", "reload", "remove")}
"""Commands that need a stack, a model, a service or torch. Their own tests run them, or they print as commands here."""

Run = Callable[..., Result]


@pytest.fixture
def run(api_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("FLOWFLEET_URL", api_url)
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(cli.app, list(words))


def test_every_command_prints_json(run: Run, api_url: str, redis_url: str, tmp_path: Path) -> None:
    ran = set[str]()

    def told(*words: str, lines: bool = False) -> Any:
        two = " ".join(words[:2])
        ran.add(two if words[0] in ("rewards", "votes", "sweep", "pools") else words[0])
        done = run(*words, "--json")
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()] if lines else json.loads(done.stdout)

    (tmp_path / "job.json").write_text(json.dumps(job_settings(tmp_path, name="a-job")))
    assert told("settings", "lr")[0]["name"] == "trainer.optimizer.lr"
    assert {"Krea2Pipeline", "QwenImagePipeline"} <= {one["pipeline"] for one in told("models")}
    assert told("submit", "job.json", "--check") == [
        {"data": "train", "prompts": 1, "first": 'A red sign that says "K7QX"', "metadata": []}
    ]
    dry = told("submit", "job.json", "--dry-run")
    assert (dry["job"]["name"], dry["processes"][0]["name"]) == ("a-job", "redis")
    (job,) = told("submit", "job.json", lines=True)
    job_id = job["id"]
    assert [one["id"] for one in told("jobs")] == [job_id]
    assert told("show", "last")["spec"]["name"] == "a-job"
    assert told("fleet")["rewards"] == {"ocr": ["a:1"]}
    assert told("rewards", "set", job_id, "ocr", "weight=0.5")["pending"]["rewards"]["ocr"]["weight"] == 0.5
    assert told("rewards", "show", job_id)["pending"]["rewards"]["ocr"]["weight"] == 0.5
    assert told("votes", "show", job_id)["votes"] == 0
    assert told("votes", "export", job_id, "--out", "votes")["pairs"] == 0
    assert told("pause", job_id)["desired"] == "paused"
    assert told("resume", job_id)["desired"] == "running"
    assert told("extend", job_id, "--steps", "200")["id"] == job_id
    assert told("set", job_id, "--priority", "high")["priority"] == "high"

    async def advance(store: Store) -> None:
        await store.jobs.update_progress(job_id, step=1, reward=float("nan"))

    in_store(redis_url, advance)
    assert told("finish", job_id)["progress"]["reward"] is None

    async def end(store: Store) -> None:
        await store.jobs.set_status(job_id, JobStatus.SUCCEEDED, "")

    in_store(redis_url, end)
    assert told("watch", job_id, lines=True)[-1]["data"]["status"] == "succeeded"
    assert told("cancel", told("submit", "job.json", lines=True)[0]["id"])["desired"] == "cancelled"
    assert len(told("sweep", "start", "job.json", "--set", "seed=1..2", "--name", "seeds")) == 2
    assert told("pools", "list")["default"]["jobs"]
    assert told("sweep", "list") == {"seeds": {"queued": 2}}
    assert told("sweep", "show", "seeds")[0]["statuses"] == {"queued": 2}
    assert told("sweep", "stop", "seeds", "--worse-than-best", "0.1") == []
    assert {job["desired"] for job in told("sweep", "finish", "seeds")} == {"cancelled"}
    assert len(told("sweep", "cancel", "seeds")) == 2
    with Client(api_url) as client:
        archive = Archive(str(tmp_path / "archive"))
        archive.write(job_id, "job.json", client.job(job_id).model_dump_json().encode())
        archive.complete(job_id, {})
    assert told("archived", str(tmp_path / "archive"))[0]["id"] == job_id
    assert told("archived", str(tmp_path / "archive"), job_id)["status"] == "succeeded"
    assert told("samples", job_id, "--step", "1") == []
    assert told("delete", "--before", "2020-01-01") == []
    assert [job["id"] for job in told("delete", "--before", "2900-01-01T12:00:00")][-1] == job_id
    assert told("delete", job_id, "--files")["desired"] == "deleted"
    assert told("down", "--state-dir", "nothing") == {"stopped": False}
    assert told("redis-acl", "passwords")[0].startswith("ACL SETUSER")

    assert ran | ELSEWHERE == {name for name, _ in options_of(typer.main.get_command(cli.app))}
