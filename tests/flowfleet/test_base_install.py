"""The base install runs the client and the command line; commands that need more run with the extra that they name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flowfleet.cli import main as cli
from flowfleet.client import Client
from tests.flowfleet.idle_controller import job_settings

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
RUN = """
import sys
blocked = frozenset(sys.argv.pop(1).split(","))

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
from flowfleet.cli.main import app
app()
"""


@cache
def packages(extra: str = "") -> frozenset[str]:
    """All that an install of the project, or of an extra of it, brings along."""
    known, found, todo = set[str](), set[str](), [("flowfleet", extra)]
    while todo:
        name, extra = todo.pop()
        if name == "flowfleet":
            listed = PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else [])
        else:
            try:
                listed = requires(name) or []
            except PackageNotFoundError:
                continue
        found.add(name)
        known.add(f"{name}[{extra}]")
        for requirement in map(Requirement, listed):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                wanted = [(canonicalize_name(requirement.name), one) for one in ("", *requirement.extras)]
                todo += [(name, one) for name, one in wanted if f"{name}[{one}]" not in known]
    return frozenset(found)


@cache
def foreign_modules(extra: str) -> str:
    """Modules of installed packages that such an install does not bring along, with commas."""
    kept = packages(extra)
    modules = packages_distributions().items()
    return ",".join(module for module, names in modules if not any(canonicalize_name(name) in kept for name in names))


def run(directory: Path, *words: str, extra: str = "") -> subprocess.CompletedProcess[str]:
    """`flowfleet WORDS` where nothing can be imported but what that install has."""
    command = [sys.executable, "-c", RUN, foreign_modules(extra), *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60)


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job_settings(tmp_path)))
    return str(path)


def test_the_base_install_is_small() -> None:
    assert {"httpx", "pydantic", "typer"} <= packages()
    assert not {"numpy", "grpcio", "redis", "torch", "fastapi"} & packages()


def test_every_command_tells_of_itself(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    commands = [
        command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback
    ]
    assert {name for name in commands if name not in done.stdout} == set()


def test_jobs_are_submitted_and_shown(job: str, api_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFLEET_URL", api_url)
    submitted = run(tmp_path, "submit", job)
    assert submitted.returncode == 0, submitted.stderr
    job_id = submitted.stdout.strip()
    for words in (["jobs"], ["samples", job_id], ["cancel", job_id]):
        done = run(tmp_path, *words)
        assert done.returncode == 0, done.stderr
    with Client(api_url) as client:
        assert client.job(job_id).desired == "cancelled"


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("down", "local"),
        ("submit JOB --dry-run", "local"),
        ("plan JOB", "trainer"),
        ("archived folder", "service"),
        ("redis-acl folder", "service"),
        ("check-reward grpc://127.0.0.1:1", "media"),
    ],
)
def test_a_command_that_needs_more_says_which_extra_has_it(words: str, extra: str, job: str, tmp_path: Path) -> None:
    done = run(tmp_path, *words.replace("JOB", job).split())
    assert done.returncode == 1
    told = " ".join(done.stderr.split())
    assert re.fullmatch(
        rf"error: `flowfleet {words.split()[0]}` needs the module \S+, which is not installed: "
        rf"pip install -e '\S+\[{extra}\]'",
        told,
    )


@pytest.mark.parametrize(
    ("words", "extra", "told"),
    [
        ("archived folder", "service", ""),
        ("redis-acl folder", "service", "ACL SETUSER"),
        ("check-reward grpc://127.0.0.1:1 --timeout 0.1", "media", "reachable"),
    ],
)
def test_with_that_extra_it_runs(words: str, extra: str, told: str, tmp_path: Path) -> None:
    done = run(tmp_path, *words.split(), extra=extra)
    assert "not installed" not in done.stderr
    assert told in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
