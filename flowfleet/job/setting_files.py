"""Tables of settings: read from a TOML, YAML or JSON file, and changed on a command line by `key=value`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml


def read_table(path: Path, what: str) -> dict[str, Any]:
    """The mapping that a file holds, read by its suffix: .toml, .yaml, .yml or .json. `what` is its name in messages,
    as "a job". Raises ValueError with the reason."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    readers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".json": json.loads,
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
    }
    if path.suffix not in readers:
        raise ValueError(f"{path}: {what} file ends in {', '.join(readers)}")
    try:
        data = readers[path.suffix](text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: {what} file is a table, not {type(data).__name__}")
    return data


def change_table(data: dict[str, Any], change: str, example: str) -> None:
    """Applies "key=value" in place; a key with dots goes into tables. ValueError, which shows the `example`."""
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"--set {change}: write it as key=value, e.g. --set {example}")
    try:
        put(data, key.strip(), _value(text.strip()))
    except ValueError as error:
        raise ValueError(f"--set {change}: {error}") from None


def put(data: dict[str, Any], key: str, value: Any) -> None:
    """Sets a key in place; one with dots goes into tables. ValueError where a table would be needed and is none."""
    *parents, name = key.split(".")
    part = data
    for parent in parents:
        part = part.setdefault(parent, {})
        if not isinstance(part, dict):
            raise ValueError(f"{parent} is a value, not a table of settings")
    part[name] = value


def _value(text: str) -> Any:
    """A value as TOML has it, else plain text: `3`, `true`, `[1, 2]`, `"a b"`, `lora`."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
