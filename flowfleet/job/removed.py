"""Settings of earlier releases that are gone, and what to do in their place."""

import re
import tomllib
from pathlib import Path

REMOVED: dict[str, str] = tomllib.loads(Path(__file__).with_name("removed.toml").read_text(encoding="utf-8"))
"""Dotted names, `N` in a list, to a sentence."""


def replacement(name: str) -> str:
    """Names the replacement of a removed setting; empty for any other name."""
    return REMOVED.get(re.sub(r"\.\d+\.", ".N.", name), "")
