"""`flowfleet doctor`: each kind of trouble is a line with advice, and the exit status says whether there is any."""

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from flowfleet.cli import main as cli
from flowfleet.cli.doctor import machine
from flowfleet.cli.doctor.controller import look_at_controller
from flowfleet.cli.doctor.finding import Finding, Status, as_notes, problem
from flowfleet.cli.doctor.packages import _extra, look_at_packages
from flowfleet.client.client import Client
from flowfleet.extras import pip_install
from flowfleet.hardware.accelerators import VISIBLE
from flowfleet.local.stack import DEFAULT_PORT, StateDir

EMPTY_FLEET: dict[str, Any] = {"replicas": [], "rewards": {}, "pools": None, "shortages": []}


def by_check(found: list[Finding]) -> dict[str, tuple[str, str]]:
    return {one.check: (str(one.status), one.found) for one in found}


def test_versions_of_an_extra_are_held_against_what_it_accepts() -> None:
    here = Requirement("httpx>=0.1")
    assert _extra("data", [here]).status is Status.OK
    old = _extra("data", [here, Requirement("pydantic<1")])
    assert (old.status, "pydantic" in old.found, old.advice) == (Status.PROBLEM, True, pip_install("data"))
    absent = Requirement("no-such-package>=1")
    assert _extra("local", [absent]).status is Status.PROBLEM
    assert _extra("mlflow", [absent]).status is Status.NOTE


def test_extras_hold_the_packages_of_those_they_name() -> None:
    found = {one.check: one.found for one in look_at_packages()}
    assert {"torch", "fastapi", "redis", "psutil"} <= set(re.findall(r"[\w-]+(?= \d)", found["extra local"]))
    assert "torch" not in found["extra hub"]


def answering(answers: dict[str, Any]) -> Client:
    def handle(request: httpx.Request) -> httpx.Response:
        answer = answers[request.url.path]
        return (
            httpx.Response(answer, json={"detail": "no"})
            if isinstance(answer, int)
            else httpx.Response(200, json=answer)
        )

    return Client("http://127.0.0.1:1", transport=httpx.MockTransport(handle))


@pytest.mark.parametrize(
    ("answers", "check", "status", "words"),
    [
        ({"/v1/version": {"version": "9.9.0"}}, "controller", "note", "runs 9.9.0"),
        ({"/v1/jobs": 401}, "key", "problem", "no"),
        ({}, "rollouts", "note", "no replica"),
        ({"/v1/fleet": EMPTY_FLEET | {"rewards": {"ocr": []}}}, "reward ocr", "problem", "no replica is ready"),
        ({"/v1/fleet": EMPTY_FLEET | {"rewards": {"ocr": ["127.0.0.1:1"]}}}, "reward ocr", "problem", "cannot be"),
        (
            {
                "/v1/fleet": EMPTY_FLEET
                | {"shortages": [{"component": "redis", "name": "primary", "reason": "is full"}]}
            },
            "redis primary",
            "problem",
            "is full",
        ),
    ],
)
def test_a_controller_is_asked(answers: dict[str, Any], check: str, status: str, words: str) -> None:
    usual = {
        "/v1/version": {"version": "0.1.0"},
        "/v1/jobs": {"items": [], "next_cursor": None},
        "/v1/fleet": EMPTY_FLEET,
    }
    with answering(usual | answers) as client:
        found = by_check(list(look_at_controller(client, is_named=True)))
    assert found[check][0] == status
    assert words in found[check][1]


def test_a_controller_that_somebody_named_must_be_there() -> None:
    with Client("http://127.0.0.1:9") as client:
        assert [one.status for one in look_at_controller(client, is_named=True)] == [Status.PROBLEM]
        assert [one.status for one in look_at_controller(client, is_named=False)] == [Status.NOTE]


def test_troubles_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    redis = tmp_path / "redis-server"
    redis.write_text("#!/bin/sh\necho Redis server v=5.0.7 sha=0\n")
    redis.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("FLOWFLEET_DEVICE", "cuda")
    monkeypatch.setattr(machine, "DISK_GIB", 1e9)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", DEFAULT_PORT))
            taken.listen()
        except OSError:
            pytest.skip(f"a program here holds port {DEFAULT_PORT}")
        found = by_check(list(machine.look_at_machine(StateDir(tmp_path / "state"))))

    assert found["redis"] == ("problem", f"5.0.7, {redis}")
    assert found["port"] == ("problem", f"{DEFAULT_PORT} is taken by another program")
    assert found["disk"][0] == "note"
    assert found["accelerators"] == ("problem", "FLOWFLEET_DEVICE is cuda, but this machine has no such accelerator")


def test_an_accelerator_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch can use the accelerator of this machine")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA X (UUID: GPU-a)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for name in (*VISIBLE.values(), "FLOWFLEET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    found = by_check(list(machine.look_at_machine(StateDir(tmp_path))))
    assert found["torch"][0] == "problem"
    assert "cannot use accelerator 0" in found["torch"][1]


def test_of_a_machine_that_runs_no_stack_nothing_is_a_problem() -> None:
    assert [one.status for one in as_notes([problem("redis", "none", "install it")])] == [Status.NOTE]


def test_the_command(api_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run: Callable[..., Any] = lambda *words: CliRunner().invoke(cli.app, ["doctor", *words])  # noqa: E731
    done = run("--url", api_url, "--json")
    assert done.exit_code == 1, done.output  # its reward is nowhere
    found = {one["check"]: one for one in json.loads(done.stdout)}
    assert found["reward ocr"]["status"] == "problem"
    assert found["controller"]["status"] == "ok"
    assert "start it, or correct its address" in run("--url", api_url).stdout
