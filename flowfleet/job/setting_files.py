"""Tables of settings: read from TOML, YAML or JSON files that may extend each other, and changed by `key=value`."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from flowfleet.text_files import JSON, read_text, unique


def read_table(path: Path, what: str) -> dict[str, Any]:
    """The mapping that a file holds, read by its suffix: .toml, .yaml, .yml or .json. `what` is its name in messages,
    as "a job". Raises ValueError with the reason."""
    try:
        text = read_text(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    readers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".json": JSON.decode,
        ".yaml": _read_yaml,
        ".yml": _read_yaml,
    }
    if path.suffix not in readers:
        raise ValueError(f"{path}: {what} file ends in {', '.join(readers)}")
    try:
        data = readers[path.suffix](text)
    except (ValueError, yaml.YAMLError) as error:  # of all three formats, and of a key that is given twice
        raise ValueError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: {what} file is a table, not {type(data).__name__}")
    return data


class _Yaml(yaml.SafeLoader):
    """Refuses mappings that give a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        unique([(str(key.value), value) for key, value in node.value if key.tag != "tag:yaml.org,2002:merge"])
        return super().construct_mapping(node, deep)


def _read_yaml(text: str) -> Any:
    return yaml.load(text, _Yaml)


def read_extended(path: Path, what: str) -> dict[str, Any]:
    """The mapping of a file laid over the mappings of the files that its key `extends` names: one path or several,
    relative to the file, later ones over earlier ones. Tables are merged; all else is replaced. ValueError as of
    `read_table`, and where files extend each other in a circle."""
    return _extended(path, what, ())


def _extended(path: Path, what: str, below: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in below:
        raise ValueError(f"{path}: it extends itself, by way of {below[-1].name}: remove one `extends`")
    own = read_table(path, what)
    names = own.pop("extends", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: extends: give the path of a file, or a list of paths")
    merged: dict[str, Any] = {}
    for name in names:
        merged = _over(merged, _extended(path.parent / name, what, (*below, path.resolve())))
    return _over(merged, own)


def _over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    tables = {name: value for name, value in own.items() if isinstance(value, dict)}
    both = {name: _over(base[name], value) for name, value in tables.items() if isinstance(base.get(name), dict)}
    return base | own | both


def change_table(data: dict[str, Any], change: str, example: str) -> None:
    """Applies "key=value" in place; a key with dots goes into tables. ValueError, which shows the `example`."""
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"--set {change}: write it as key=value, e.g. --set {example}")
    try:
        put(data, key.strip(), value_of(text.strip()))
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


def value_of(text: str) -> Any:
    """A value as TOML has it, else plain text: `3`, `true`, `[1, 2]`, `"a b"`, `lora`."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
