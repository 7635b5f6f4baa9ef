"""Turns a job file into the job that is submitted: with command-line changes, paths found, defaults filled in."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowfleet import hub
from flowfleet.job.setting_files import change_table
from flowfleet.job.spec import JobSpec, parse_job, read_job_file
from flowfleet.prompts.uploads import is_upload

PATH_SETTINGS = (
    ("model", "path"),
    ("model", "adapter"),
    ("algorithm", "teachers", "*", "adapter"),
    ("trainer", "resume"),
    ("data", "train"),
    ("data", "validation"),
    ("data", "sources", "path"),
    ("data", "sources", "validation"),
)
"""Settings that name files; of a list, of each of its tables; `*` is every name of a table."""
RECIPES = Path(__file__).parents[2] / "recipes"
"""Recipes of the checkout or of the installed package."""
BASES = "bases"
"""Folder of what recipes extend."""
COMPOSITION_LEFT = "docs/results.md has its results, and a checkout of commit 560f105e repeats them"
"""Directs users of the removed composition study."""


def data_folders(spec: JobSpec) -> tuple[Path, ...]:
    """Folders of this machine that the job names: for the `data_roots` of a stack that is started for it."""
    data = [Path(place).parent for _, place, _ in spec.data_files if "://" not in place and not is_upload(place)]
    teachers = [teacher.adapter for teacher in spec.teachers.values()]
    named = (spec.model.path, spec.model.adapter, spec.trainer.resume, *teachers)
    paths = [place for place in named if place and not place.startswith("job:") and hub.name_of(place) is None]
    return (*data, *map(Path, paths))


def recipe_names() -> list[str]:
    """Names of all recipes: their paths under `recipes/` without the suffix, as "papers/flow_grpo_sd35_ocr"."""
    files = {path: read_job_file(path) for path in RECIPES.rglob("*.toml") if path.parent.name != BASES}
    # a job names a model to train and what to train it on
    jobs = [path for path, table in files.items() if isinstance(table.get("model"), dict) and "data" in table]
    return sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in jobs)


def find_job_file(path: Path) -> Path:
    """The job file that the user means: an existing file, or a recipe by its path, or by its name without `recipes/`
    and suffix.

    Raises:
        ValueError: neither; the message lists recipes of similar names.
    """
    if path.suffix or path.is_absolute() or (path.exists() and not path.is_dir()):
        return path if path.exists() else shipped(str(path)) or path
    names = recipe_names()
    if str(path) in names:
        return RECIPES / f"{path}.toml"
    if path.name.startswith("composition_"):
        raise ValueError(f"{path}: this recipe has left Flowfleet: {COMPOSITION_LEFT}")
    near = difflib.get_close_matches(str(path), names, n=3, cutoff=0.5)
    near += [name for name in names if Path(name).name == path.name and name not in near]
    hint = f"did you mean {', '.join(near)}?" if near else f"recipes are {', '.join(names)}"
    raise ValueError(f"{path}: no such job file, and no recipe of this name: {hint}")


def prepare_job(path: Path, changes: Sequence[str] = (), *, same_machine: bool) -> JobSpec:
    """Reads a job file or a recipe by name, applies `key=value` changes and validates it.

    Raises ValueError with what to change.

    Where the controller sees our files relative paths are made absolute: each is looked for in the current directory,
    then in the job file's directory and the directories above it, and the first that exists is taken. `recipes/…` is
    looked for last in the installed package. A path found
    nowhere, and every path for a stack elsewhere, goes as it is written and is read relative to the controller's
    directory; `Client.submit` uploads data files that it cannot read there.
    """
    path = find_job_file(path)
    folders = folders_of(path) if same_machine else []
    return parse_job(changed_job(read_job_file(path), changes, folders))


def folders_of(file: Path | None) -> list[Path]:
    """Folders in which the relative paths of a job file, or of a table without one, are looked for."""
    return [Path.cwd(), *(file.resolve().parents if file else ())]


def shipped(written: str) -> Path | None:
    """Finds the file of this package that `recipes/…` names, such as the tiny model."""
    path = RECIPES.parent / written
    return path if Path(written).parts[:1] == (RECIPES.name,) and ".." not in written and path.exists() else None


def changed_job(data: dict[str, Any], changes: Sequence[str], folders: Sequence[Path]) -> dict[str, Any]:
    """A job's table with `key=value` changes, in place. Relative paths are looked for in these folders."""
    for change in changes:
        change_table(data, change, "schedule.steps=20")
    for *tables, name in PATH_SETTINGS:
        for table in _tables(data, tables):
            if name in table:
                table[name] = find_file(table[name], folders)
    return data


def _tables(data: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """The tables of a job, not yet validated, at a place; of a list all of them."""
    found = [data]
    for name in names:
        tables = [table for table in found if isinstance(table, dict)]
        inner = [value for table in tables for value in (table.values() if name == "*" else [table.get(name)])]
        found = [table for one in inner for table in (one if isinstance(one, list) else [one])]
    return [table for table in found if isinstance(table, dict)]


def find_file(written: Any, folders: Sequence[Path]) -> Any:
    """The path of a file in the first of these folders that has it, or in the package; else what is written."""
    if not isinstance(written, str) or Path(written).is_absolute() or "://" in written or not folders:
        return written
    found = next((folder / written for folder in folders if (folder / written).exists()), None) or shipped(written)
    return written if found is None else str(found)
