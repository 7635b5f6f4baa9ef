"""How the Makefile installs vLLM-Omni: what is remade after what, with a pip that does nothing."""

import os
import shutil
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ("Makefile", "pyproject.toml", "requirements/vllm-omni-cpu.txt")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What make reads, and an environment with everything in it."""
    (tmp_path / "requirements").mkdir()
    for name in SOURCES:
        shutil.copyfile(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("/bin/true")
    assert installed(tmp_path, "setup") == ["torch", "flowfleet[dev]", "vLLM-Omni"]
    for stamp in (tmp_path / ".venv").glob(".*"):  # clocks of file systems have ticks of some milliseconds
        os.utime(stamp, ns=(0, stamp.stat().st_mtime_ns - 10**10))
    return tmp_path


def installed(project: Path, target: str) -> list[str]:
    command = ["make", "-C", str(project), "--no-print-directory", "VENV=.venv", "PIP=true", "PYTHON=true", target]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[1].partition("==")[0] for line in told if line.startswith("Installing")]


def test_what_is_there_is_not_installed_again(project: Path) -> None:
    for target in ("setup", "vllm-omni"):
        assert installed(project, target) == []


@pytest.mark.parametrize("changed", SOURCES)
def test_vllm_omni_is_installed_anew_after_what_may_have_replaced_it(project: Path, changed: str) -> None:
    os.utime(project / changed)
    assert installed(project, "setup")[-1] == "vLLM-Omni"
    assert installed(project, "setup") == []


def test_the_cuda_build_takes_the_place_of_the_other_and_keeps_it(project: Path) -> None:
    assert installed(project, "vllm-omni-cuda") == ["vLLM-Omni"]
    for target in ("vllm-omni-cuda", "vllm-omni", "setup"):
        assert installed(project, target) == []


def test_the_versions_are_those_of_the_extra_and_of_the_tests() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm-omni"]
    pinned = (ROOT / "requirements/vllm-omni-cpu.txt").read_text().splitlines()
    assert f"vllm-omni=={version('vllm-omni')}" in pinned
    assert {f"{name}=={version(name)}" for name in ("vllm", "vllm-omni")} <= set(extra)
