"""Reads the recipes of recipes/papers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowfleet.job.files import RECIPES
from flowfleet.job.spec import read_job_file

FOLDER = RECIPES / "papers"
SOURCES = "sources.toml"


def read_recipes() -> dict[str, dict[str, Any]]:
    """Name of a published recipe to the settings that it gives, by dotted names."""
    files = sorted(path for path in FOLDER.glob("*.toml") if path.name != SOURCES)
    return {path.stem: dict(_leaves("", read_job_file(path))) for path in files}


def _leaves(prefix: str, data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in data.items():
        found += _leaves(f"{prefix}{key}.", value) if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found
