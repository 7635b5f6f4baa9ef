from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.pretend import PretendSlurm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/slurm/" in item.nodeid:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PretendSlurm]:
    before = dict(os.environ)
    cluster = PretendSlurm(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a fleet."""
    return tmp_path / "fleet"
