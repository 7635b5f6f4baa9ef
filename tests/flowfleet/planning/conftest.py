from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowfleet.job.spec import JobSpec, parse_job


@pytest.fixture(scope="session")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen-Image's configurations at its real size."""
    from recipes.full_size.make_model import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("models") / "full-size")


@pytest.fixture
def job() -> Callable[..., JobSpec]:
    """A job on a model folder, by its tables."""

    def make(path: Path, **tables: dict[str, Any]) -> JobSpec:
        return parse_job({"model": {"path": str(path)}, "data": {"train": "x"}, "rewards": {"ocr": {}}, **tables})

    return make
