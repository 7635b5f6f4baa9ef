"""One stack, tiny checkpoints and prompt files for the cases of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Fleet
from tests.e2e.matrix.cases import TEXTS, write_data
from tests.e2e.matrix.texts import make_text
from tests.tiny_models import make_tiny


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a kind, made when it is first asked for."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda kind: (make_text if kind in TEXTS else make_tiny)(kind, root / kind))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Any]) -> Iterator[Fleet]:
    with make_fleet(rewards=("jpeg_compressibility", "image_quality"), model=None) as running:
        yield running
