"""The example plugin as docs/extending.md tells it: quoted as it is, installed, found by services, its tests run."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from docs.generate.markdown import outdated
from examples import quotes
from flowfleet.job.spec import load_job
from flowfleet.proto.rollout_pb2 import LoraSpec, ModelSpec, Noise
from tests.services.rollout.replica import Client, ReplicaProcess, make_generate

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples/plugin"
PAGE = ROOT / quotes.PAGE
INSTALL, DRY_RUN, TESTS = (
    "python -m pip install examples/plugin",
    "flowfleet submit examples/plugin/job.toml --dry-run",
    "python -m pytest examples/plugin/tests",
)


class Workplace:
    """A directory with a copy of the plugin, and packages installed there in addition to this Python's."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.site = directory, directory / "site"
        shutil.copytree(PLUGIN, directory / "examples/plugin", ignore=shutil.ignore_patterns("__pycache__"))

    @property
    def env(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "PYTHONPATH": f"{self.site}{os.pathsep}{ROOT}"}

    def run(self, line: str) -> str:
        """What a command line prints; it must succeed."""
        done = subprocess.run(
            line, shell=True, cwd=self.directory, env=self.env, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Where the plugin is installed, from its folder alone."""
    place = Workplace(tmp_path_factory.mktemp("plugin"))
    place.run(f"{INSTALL} --target {place.site} --quiet --no-index --no-deps --no-build-isolation")
    return place


def test_the_page_quotes_the_files_as_they_are() -> None:
    assert outdated(PAGE, quotes.parts(ROOT)) == [], "run `make docs`"


def test_the_page_quotes_or_links_every_file_and_has_no_code_of_its_own() -> None:
    quoted, page = quotes.parts(ROOT), PAGE.read_text(encoding="utf-8")
    files = {path.relative_to(ROOT).as_posix() for suffix in ("py", "toml") for path in PLUGIN.rglob(f"*.{suffix}")}
    shown = set(quoted) | set(re.findall(r"\]\(\.\./(examples/plugin/[^)]+)\)", page))
    assert {name for name in files if not name.endswith("tests/conftest.py") and "/build/" not in name} == shown
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len([name for name, _ in blocks if name != "sh"]) == len(quoted) > 0
    assert [code.strip() for name, code in blocks if name == "sh"] == [INSTALL, DRY_RUN, TESTS]


def test_the_plugins_own_tests_pass(installed: Workplace) -> None:
    assert re.search(r"\d+ passed", installed.run(f"{TESTS} -p no:cacheprovider"))


@pytest.mark.long
def test_they_run_from_the_checkout_without_an_installation(tmp_path: Path) -> None:
    """Also where pytest has none of this repository's plugins."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    line = f"{TESTS} -p no:xdist -p no:timeout -p no:cacheprovider -k 'cispo or sit_sde'"
    done = subprocess.run(line, shell=True, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert re.search(r"\d+ passed", done.stdout), done.stdout + done.stderr


def test_a_job_is_resolved_with_the_plugin_and_refused_without(installed: Workplace) -> None:
    shown = installed.run(DRY_RUN)
    assert "clip_nats: 0.7" in shown
    assert "noise: {type: sit_sde, eta: 1.0, share_initial_noise: false}" in shown
    assert "updates_per_step: 2" in shown
    with pytest.raises(ValueError, match=r"algorithm\.name: 'cispo' is not one of"):
        load_job(PLUGIN / "job.toml")


async def test_a_replica_loads_the_model_and_knows_the_step(
    installed: Workplace, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service that never reads a job file has the plugin from its start."""
    monkeypatch.syspath_prepend(PLUGIN / "tests")
    make_tiny = importlib.import_module("tiny_ovis_image").make_tiny_ovis_image
    model = ModelSpec(path=str(make_tiny(tmp_path / "model")), dtype="float32")
    monkeypatch.setenv("PYTHONPATH", installed.env["PYTHONPATH"])
    replica = ReplicaProcess(tmp_path / "replica", redis_url)

    async def ask() -> tuple[str, str]:
        async with Client(replica.address, redis_url) as client:
            await client.init("job", model, lora=LoraSpec(rank=2, alpha=4.0, target_modules=["attn.to_q"]))
            messages = []
            for step_type in ("sit_sde", "sit_sd"):
                request = make_generate("job", 1, noise=Noise(step_type=step_type, eta=1.0, sde_steps=[0]))
                code, message = await client.refusal(client.generate(request))
                messages.append(f"{code.name}: {message}")
            return messages[0], messages[1]

    try:
        known, unknown = await ask()
    finally:
        replica.terminate()
    assert replica.wait() == 0, replica.log.read_text()
    assert known.startswith(grpc.StatusCode.FAILED_PRECONDITION.name), "no weights were published"
    assert unknown.startswith(grpc.StatusCode.INVALID_ARGUMENT.name)
    assert "give one of sde, cps, dance_sde, sit_sde" in unknown
