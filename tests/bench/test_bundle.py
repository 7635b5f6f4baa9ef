"""The bundle for a machine without network: the closure of requirements, and an archive like site-packages."""

import os
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bench.bundle import missing, pack, required_by, with_their_own

THERE = {"python_version": "3.12", "platform_system": "Linux"}


def requirements(*texts: str) -> list[Requirement]:
    return [Requirement(text) for text in texts]


def test_an_extra_stands_for_others() -> None:
    asked = requirements(
        'flowfleet[trainer,media]; extra == "local"', 'flowfleet[service]; extra == "media"', 'av; extra == "media"'
    )
    assert with_their_own("local", asked) == ["local", "", "media", "trainer", "service"]


def test_each_package_is_asked_for_once_where_its_marker_holds() -> None:
    seen = {"torch"}
    asked = requirements(
        "Torch>=2",
        'tomli; python_version < "3.11"',
        "redis>=7,<9",
        "redis>=6",
        'rich_x>=1; extra == "a"',
        'b; extra == "z"',
    )
    found = missing(asked, seen, THERE, ["a", ""])
    assert {(one.name, str(one.specifier)) for one in found} == {("redis", "<9,>=7"), ("rich_x", ">=1")}
    assert seen == {"torch", "redis", "rich-x"}
    assert missing(asked, seen, THERE, ["a", ""]) == []


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing/__init__.py", "")
        archive.writestr("thing/__init__.pyi", "")
        archive.writestr("thing/tests/test_it.py", "")
        archive.writestr("thing-1.0.data/scripts/thing", "")
        archive.writestr("thing-1.0.dist-info/METADATA", "Name: thing\nRequires-Dist: redis>=7\nRequires-Dist: rich\n")
        server = zipfile.ZipInfo("thing/bin/server")
        server.external_attr = 0o755 << 16
        archive.writestr(server, "#!")
    return path


def test_wheels_become_a_folder_of_packages(wheel: Path, tmp_path: Path) -> None:
    assert required_by(wheel) == ["redis>=7", "rich"]
    pack([wheel], tmp_path / "packages.tar.xz")
    with tarfile.open(tmp_path / "packages.tar.xz") as archive:
        archive.extractall(tmp_path / "site", filter="data")
    files = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert {name for name in files if name.startswith("thing")} == {
        "thing/__init__.py",
        "thing/bin/server",
        "thing-1.0.dist-info/METADATA",
    }
    assert os.access(tmp_path / "site/thing/bin/server", os.X_OK)
    (own,) = (tmp_path / "site" / name for name in files if name.startswith("flowfleet-"))
    assert f"\nVersion: {version('flowfleet')}\n" in own.read_text(), "which services tell"
