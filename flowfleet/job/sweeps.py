"""Sweeps: a job for each combination of values of some settings."""

import copy
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flowfleet.api.jobs import MAX_SWEEP, AskedSweep, SweepPart
from flowfleet.job.files import PATH_SETTINGS, changed_job, find_file, find_job_file, folders_of
from flowfleet.job.setting_files import put, value_of
from flowfleet.job.spec import JobSpec, parse_job, read_job_file
from flowfleet.part import parsed

JobFile = Mapping[str, Any] | Path | str
Values = Mapping[str, Any]
_RANGE: Final = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})")
_LIST: Final = r"\[(?:[^][]|\[(?:[^][]|\[(?:[^][]|\[[^][]*\])*\])*\])*\]"
_PIECE: Final = re.compile(rf"""(?:{_LIST}|\{{[^}}]*\}}|"[^"]*"|'[^']*'|[^,])+""")


def values_by_setting(changes: Sequence[str]) -> dict[str, list[Any]]:
    """Reads `key=VALUES`: `1e-5,1e-4`, `0..2` for 0, 1, 2, and the same in brackets. Values are as TOML has them, else
    plain text. Raises ValueError."""
    found: dict[str, list[Any]] = {}
    for change in changes:
        key, equals, text = (part.strip() for part in change.partition("="))
        if not equals or not key or key in found:
            raise ValueError(f"--set {change}: write all values of a setting as key=values, e.g. --set seed=0..2")
        pieces = _PIECE.findall(text)
        if len(pieces) == 1 and text[0] + text[-1] == "[]":
            pieces = _PIECE.findall(text[1:-1])
        found[key] = [value for piece in pieces for value in _values(piece.strip())]
    return found


def combinations(settings: Values, *, zipped: bool = False) -> list[dict[str, Any]]:
    """Settings of each job: a grid, whose last setting changes first; `zipped`: the first values together, then the
    second ones. `settings`: dotted name → list of values, or one value that all jobs have. Raises ValueError."""
    listed = {key: list(one) if isinstance(one, list | tuple | range) else [one] for key, one in settings.items()}
    for key, values in listed.items():
        if len({json.dumps(value) for value in values}) < max(1, len(values)):
            raise ValueError(f"{key}: give at least one value, and each once")
    lengths = [len(values) for values in listed.values() if len(values) > 1]
    if not lengths or (zipped and len(set(lengths)) > 1):
        raise ValueError("give a setting several values, as in --set seed=0..2, and zipped settings equally many")
    _check_size(lengths[0] if zipped else math.prod(lengths))
    rows: Iterable[tuple[Any, ...]] = itertools.product(*listed.values())
    if zipped:
        rows = zip(*(values * (lengths[0] // len(values)) for values in listed.values()), strict=True)
    return [dict(zip(listed, row, strict=True)) for row in rows]


def asked_sweep(job: JobFile, settings: Values, *, zipped: bool, name: str, same_machine: bool) -> dict[str, Any]:
    """An AskedSweep without `at_once`, of a job file or its table. Without a name it gets one by what it asks for, so
    that the same sweep has the same name. Paths are found as `prepare_job` finds them. Raises ValueError."""
    file = None if isinstance(job, Mapping) else find_job_file(Path(job))
    folders = folders_of(file) if same_machine else []
    table = changed_job(read_job_file(file) if file else copy.deepcopy(dict(job)), (), folders)  # type: ignore[arg-type]
    rows = combinations(settings, zipped=zipped)
    for key in {*settings} & {".".join(path) for path in PATH_SETTINGS}:
        rows = [{**row, key: find_file(row[key], folders)} for row in rows]
    return {
        "name": name or f"{str(table.get('name', 'job'))[:56]}-{digest([table, rows])[:6]}",
        "job": table,
        "settings": rows,
    }


def plan_sweep(asked: Any) -> list[tuple[SweepPart, JobSpec]]:
    """Validates an AskedSweep and its jobs. Raises ValueError, a line a problem, which names the jobs that have it."""
    sweep = parsed(AskedSweep, asked)
    given = {key: {json.dumps(row.get(key)) for row in sweep.settings} for row in sweep.settings for key in row}
    planned, problems = [], dict[str, Sequence[str]]()
    for row in sweep.settings:
        table, own = copy.deepcopy(sweep.job), {key: row[key] for key in row if len(given[key]) > 1}
        try:
            for key, value in row.items():
                put(table, key, copy.deepcopy(value))
            planned.append((SweepPart(name=sweep.name, settings=own, at_once=sweep.at_once), parse_job(table)))
        except ValueError as error:
            problems[label(own)] = str(error).split("\n")
    if problems:
        raise ValueError("\n".join(told(problems)))
    return planned


def label(settings: Mapping[str, Any]) -> str:
    """A job's settings in a line: `algorithm.clip_range=0.0001 seed=1`."""
    return " ".join(f"{key}={shown(value)}" for key, value in settings.items())


def shown(value: Any) -> str:
    """A setting's value as the command line has it."""
    return value if isinstance(value, str) else json.dumps(value)


def told(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """The first problems of a sweep's jobs, by label: each once, with the jobs that have it."""
    jobs: dict[str, list[str]] = {}
    for job, text in ((job, text) for job, texts in problems.items() for text in texts):
        jobs.setdefault(text, []).append(job)
    return [f"{text} ({'; '.join(having[:3])}{'; …' * (len(having) > 3)})" for text, having in jobs.items()][:20]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _check_size(num_jobs: int) -> None:
    if num_jobs > MAX_SWEEP:
        raise ValueError(f"{num_jobs:,} jobs: a sweep has at most {MAX_SWEEP}; give fewer values, or several sweeps")


def _values(piece: str) -> Iterable[Any]:
    if (found := _RANGE.fullmatch(piece)) is None:
        return [value_of(piece)]
    first, last = int(found[1]), int(found[2])
    _check_size(last - first + 1)
    return range(first, last + 1)
