"""The table of values in the chart's README, from the comments of values.yaml.

    python -m deploy.helm.values_table

A comment that begins with `# --` tells what the key below it is for. A key without one is a table of further keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from docs.generate.markdown import rewrite, table

CHART = Path(__file__).parent / "flowfleet"
README = CHART / "README.md"

_KEY = re.compile(r"( *)([A-Za-z]\w*):")


def parts() -> dict[str, str]:
    """Generated parts of the README."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    rows = _rows(yaml.safe_load(text), comments(text))
    return {"values": table(("value", "default", "what it is"), rows)}


def comments(text: str) -> dict[str, str]:
    """What values.yaml says of each key that has a comment, by dotted path."""
    found: dict[str, str] = {}
    path: list[str] = []
    lines: list[str] = []
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith("# --"):
            lines = [bare.removeprefix("# --").strip()]
        elif bare.startswith("#"):
            lines = [*lines, bare.removeprefix("#").strip()] if lines else []
        elif key := _KEY.match(line):
            path = [*path[: len(key[1]) // 2], key[2]]
            if lines:
                found[".".join(path)] = " ".join(lines)
            lines = []
        else:
            lines = []
    return found


def _rows(values: Mapping[str, Any], known: Mapping[str, str], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Raises ValueError for a value without a description."""
    for name, value in values.items():
        path = prefix + name
        if path in known:
            yield f"`{path}`", f"`{json.dumps(value)}`", known[path]
        elif isinstance(value, dict) and value:
            yield from _rows(value, known, f"{path}.")
        else:
            raise ValueError(f"values.yaml: {path} has no comment: write `# -- what it is` above it")


if __name__ == "__main__":
    rewrite(README, parts())
