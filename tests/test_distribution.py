"""The wheel that is built from the repository: what it holds, and what its metadata says."""

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("flowfleet", "services", "recipes")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def tracked(*paths: str) -> list[str]:
    command = ["git", "ls-files", "--", *paths]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of a copy of what git tracks, so that leftovers of earlier builds hide nothing."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in tracked("pyproject.toml", "README.md", "LICENSE", "NOTICE", *PACKAGES):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=source, check=True, capture_output=True, timeout=120)
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_holds_all_code_and_what_code_reads(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    code = [name for name in tracked("flowfleet", "services") if not name.endswith(".md")]
    assert set(code) <= names
    models = [f"recipes/{model}/{part}" for model in ("tiny", "tiny_video") for part in ("model", "prompts")]
    assert set(tracked(":(glob)recipes/*.toml", "recipes/bases", "recipes/papers", "recipes/data", *models)) <= names
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, "flowfleet-0.1.0.dist-info"}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_typed(wheel: zipfile.ZipFile, package: str) -> None:
    assert f"{package}/py.typed" in wheel.namelist()


def test_it_holds_the_licenses_of_all_that_it_ships(wheel: zipfile.ZipFile) -> None:
    for name in ("LICENSE", "NOTICE"):
        assert wheel.read(f"flowfleet-0.1.0.dist-info/licenses/{name}") == (ROOT / name).read_bytes()
    notice = (ROOT / "NOTICE").read_text()
    for path in tracked("*LICENSE*"):
        if path != "LICENSE":
            assert path in notice
            assert wheel.read(path) == (ROOT / path).read_bytes()


def test_files_that_the_notice_names_exist() -> None:
    lines = re.findall(r"^ +Files: +(.+)$", (ROOT / "NOTICE").read_text(), re.MULTILINE)
    files = [name for line in lines for name in line.split(", ")]
    assert files
    assert [name for name in files if not list(ROOT.glob(name))] == []


def test_its_metadata_names_license_authors_and_readme(wheel: zipfile.ZipFile) -> None:
    metadata = message_from_string(wheel.read("flowfleet-0.1.0.dist-info/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0 AND MIT"
    assert metadata["Author"] == "Flowfleet authors"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])


def test_the_changelog_begins_with_the_version() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version is not None
    assert heading is not None
    assert heading[1] == version[1]
