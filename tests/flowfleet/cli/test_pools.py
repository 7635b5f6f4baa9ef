"""`flowfleet up --pool` and `flowfleet pools` over a stack of real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowfleet.client import Client
from flowfleet.job.files import prepare_job
from flowfleet.local.stack import StateDir
from flowfleet.process.service import API_KEY


def test_pools_of_a_running_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """b is added and has a job, so it stays; it starts again with the stack; without the job it goes."""
    monkeypatch.chdir(tmp_path)
    for name in ("FLOWFLEET_URL", API_KEY):
        monkeypatch.delenv(name, raising=False)

    def flowfleet(*words: str) -> Any:
        return subprocess.run([sys.executable, "-m", "flowfleet.cli.main", *words], capture_output=True, text=True)

    def pools() -> Any:
        return json.loads(flowfleet("pools", "list", "--json").stdout)

    up = ("up", "--detach", "--port", "0", "--pool", "a")
    started = flowfleet(*up)
    try:
        assert started.returncode == 0, started.stderr
        added = flowfleet("pools", "add", "b:max_batch=64", "--json")
        assert added.returncode == 0, added.stderr
        assert json.loads(added.stdout)["rollout-b-0"]["pool"] == "b"
        stack = StateDir(Path("runs/local")).read()
        assert stack is not None
        assert {name for name in stack.processes if name.startswith("rollout")} == {"rollout-a-0", "rollout-b-0"}
        with Client(stack.url) as client:
            job = client.submit(
                prepare_job(Path("tiny_ocr"), ["rollout.pool=b", "schedule.steps=1000"], same_machine=True)
            )
            shown = pools()
            assert {name: (row["replicas"], row["jobs"]) for name, row in shown.items()} == {
                "a": (1, []),
                "b": (1, [job.id]),
            }
            refused = flowfleet("pools", "remove", "b")
            assert (refused.returncode, f"wait for, finish or cancel {job.id}" in refused.stderr) == (1, True)
            client.cancel(job.id)
            client.wait(job.id)
        assert flowfleet("down").returncode == 0
        assert flowfleet(*up).returncode == 0
        assert {*pools()} == {"a", "b"}
        assert json.loads(flowfleet("pools", "remove", "b", "--json").stdout) == {"removed": "b"}
        assert {*pools()} == {"a"}
    finally:
        flowfleet("down")
