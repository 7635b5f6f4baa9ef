"""Interpreters with trackers that cannot be installed with the development tools; `tests/packages` makes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def mlflow_python() -> str:
    """A Python with `flowfleet[mlflow]`."""
    return _python("mlflow")


def trackio_python() -> str:
    """A Python with `flowfleet[trackio]`."""
    return _python("trackio")


def _python(extra: str) -> str:
    folder = Path(os.environ.get("FLOWFLEET_TRACKERS", ROOT / ".venv-trackers")) / extra
    python = folder / "bin/python"
    if not python.exists():
        pytest.skip(f"there is no {python}: tests/packages makes it")
    return str(python)
