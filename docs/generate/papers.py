"""The generated parts of docs/papers.md: the published recipes next to our defaults, from recipes/papers/sources.toml.

`python -m docs.generate.papers` rewrites them, in the directory of the repository. Free of torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from docs.generate.markdown import rewrite, table
from flowfleet.job.files import RECIPES
from flowfleet.job.setting_files import read_table
from flowfleet.job.spec import JobSpec, parse_job, read_job_file

PAGE = Path("docs/papers.md")
FOLDER = RECIPES / "papers"
SOURCES = "sources.toml"

_PER_JOB = ("name", "data.", "model.path", "rewards.", "algorithm.name")
"""Settings of which a default has no meaning."""


def read_sources() -> dict[str, Any]:
    """The origins of the recipes' values: `sources` by name, and `recipes` by name with their `settings`."""
    return read_table(FOLDER / SOURCES, "a table of sources")


def read_recipes() -> dict[str, dict[str, Any]]:
    """Name of a published recipe to the settings that it gives, by dotted names."""
    files = sorted(path for path in FOLDER.glob("*.toml") if path.name != SOURCES)
    return {path.stem: dict(_leaves("", read_job_file(path))) for path in files}


def parts() -> dict[str, str]:
    """Name to content of each generated part of the page."""
    known = read_sources()
    recipes = known["recipes"]
    return {
        "recipes": table(
            ["`flowfleet submit …`", "what", "read in"],
            [
                [f"`papers/{name}`", _title(recipe), _read_in(recipe, known["sources"])]
                for name, recipe in recipes.items()
            ],
        ),
        "settings": table(["setting", "our default", "published"], _comparison(recipes)),
        "ours": table(["setting", "here", "why", "recipes"], _ours(recipes)),
        "missing": table(["published", "recipes"], _missing(recipes)),
    }


def _leaves(prefix: str, data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in data.items():
        found += _leaves(f"{prefix}{key}.", value) if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _title(recipe: Mapping[str, Any]) -> str:
    note = f" {recipe['note']}" if "note" in recipe else ""
    return f"[{recipe['title']}]({recipe['paper']}).{note}"


def _read_in(recipe: Mapping[str, Any], sources: Mapping[str, Any]) -> str:
    used = dict.fromkeys(setting["source"] for setting in recipe["settings"].values() if "source" in setting)
    files: dict[str, list[str]] = {}
    for name in used:
        files.setdefault(sources[name]["repository"], []).append(f"`{sources[name]['file'].rpartition('/')[2]}`")
    return "; ".join(f"{repository}: {', '.join(names)}" for repository, names in files.items())


def _comparison(recipes: Mapping[str, Any]) -> list[list[str]]:
    defaults = {recipe["settings"]["algorithm.name"]["value"]: None for recipe in recipes.values()}
    jobs = {name: _least_job(name) for name in defaults}
    names = dict.fromkeys(name for recipe in recipes.values() for name in recipe["settings"])
    rows = []
    for name in names:
        if name.startswith(_PER_JOB):
            continue
        given: dict[str, list[str]] = {}
        published: dict[str, list[str]] = {}
        for recipe_name, recipe in recipes.items():
            setting = recipe["settings"].get(name)
            if setting is not None and "ours" not in setting:
                published.setdefault(_value(setting["value"]), []).append(recipe_name)
                algorithm = recipe["settings"]["algorithm.name"]["value"]
                default = _value(reduce(getattr, name.split("."), jobs[algorithm]))
                if algorithm not in given.setdefault(default, []):
                    given[default].append(algorithm)
        if published:
            rows.append([f"`{name}`", _by_value(given, jobs), _by_value(published, recipes)])
    return rows


def _least_job(algorithm: str) -> JobSpec:
    return parse_job(
        {"model": {"path": "m"}, "data": {"train": "d"}, "rewards": {"r": {}}, "algorithm": {"name": algorithm}}
    )


def _ours(recipes: Mapping[str, Any]) -> list[list[str]]:
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, recipe in recipes.items():
        for setting, entry in recipe["settings"].items():
            if "ours" in entry and setting not in ("name", "algorithm.name"):
                rows.setdefault((setting, _value(entry["value"]), entry["ours"]), []).append(name)
    return [[f"`{setting}`", value, why, _names(names, recipes)] for (setting, value, why), names in rows.items()]


def _missing(recipes: Mapping[str, Any]) -> list[list[str]]:
    rows: dict[str, list[str]] = {}
    for name, recipe in recipes.items():
        for text in recipe.get("missing", ()):
            rows.setdefault(text, []).append(name)
    return [[text, _names(names, recipes)] for text, names in rows.items()]


def _by_value(found: Mapping[str, list[str]], known: Iterable[str]) -> str:
    """Values, each with who has it where there are several; the most common one last."""
    if len(found) == 1:
        return next(iter(found))
    *others, (most, names) = sorted(found.items(), key=lambda item: len(item[1]))
    rest = "the others" if len(names) > 2 else _names(names, known)
    return "; ".join([f"{value}: {_names(names, known)}" for value, names in others] + [f"{most}: {rest}"])


def _names(names: list[str], known: Iterable[str]) -> str:
    """Names, shortened to `start_*` where they are all of those known that begin so."""
    starts = {"_".join(name.split("_")[:length]) + "_" for name in names for length in range(1, name.count("_") + 1)}
    groups = {start: {name for name in known if name.startswith(start)} for start in starts}
    short: list[str] = []
    left = set(names)
    for start, group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        if len(group) > 1 and group <= left:
            short.append(f"{start}*")
            left -= group
    return ", ".join(f"`{name}`" for name in sorted(short + list(left)))


def _value(value: Any) -> str:
    """A value as in a job file; long lists by their length."""
    if isinstance(value, list | tuple):
        return f"{len(value)} names" if value and isinstance(value[0], str) else json.dumps(list(value))
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE, parts())
