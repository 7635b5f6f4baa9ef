"""Flowfleet's own losses and settings by kind, and its algorithms (algorithms.toml). Importing it registers them."""

import importlib
import tomllib
from pathlib import Path

from flowfleet.algorithms.registry import Algorithm, register_algorithm

for _kind in ("policy", "matching", "followed", "pairs", "sequences"):  # the order of tables in the docs
    importlib.import_module(f"{__name__}.{_kind}")
for _name, _fields in tomllib.loads(Path(__file__).with_name("algorithms.toml").read_text(encoding="utf-8")).items():
    register_algorithm(Algorithm(_name, **_fields))
