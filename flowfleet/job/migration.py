"""Reads jobs that earlier releases stored: a table of settings of format 0 to one of today.

Format 0 named every setting of every loss, and settings that are gone. It is known by its keys, so that a record, an
archive and a client of that release are all read.
"""

import copy
import json
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, Loss
from flowfleet.job.removed import replacement

_FORMAT_0: dict[str, Any] = json.loads(Path(__file__).with_name("format_0.json").read_text(encoding="utf-8"))
ALGORITHM: dict[str, Any] = _FORMAT_0["algorithm"]
"""Settings of `algorithm` in format 0, with the schema's defaults."""
REMOVED: dict[str, Any] = _FORMAT_0["removed"]
"""Dotted settings of format 0 that are gone, with their defaults."""
BY_LOSS: dict[str, dict[str, Any]] = _FORMAT_0["by_loss"]
"""The same where a loss had another default."""
_OF_SOURCES = ("prompt_column", "ignore_columns")
ADVICE = (
    "finish the job with the release that started it, or continue it as a new job with `flowfleet submit --from ID`"
)


def is_first_format(spec: Any) -> bool:
    """Returns whether a release that named every setting of every loss wrote this job."""
    part = spec.get("algorithm") if isinstance(spec, dict) else None
    return isinstance(part, dict) and ALGORITHM.keys() <= part.keys()


def migrated(spec: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A stored job of format 0 as a job of today, and why it must not continue so: settings that are gone and that it
    had changed, a sentence each."""
    moved = copy.deepcopy(spec)
    reasons = list(_without_removed(moved))
    part = moved["algorithm"]
    loss = LOSSES.get(str(part.get("loss")))
    if loss is not None:
        moved["algorithm"] = {name: value for name, value in part.items() if not _is_unread(loss, part, name, value)}
    return moved, reasons


def today(spec: dict[str, Any]) -> dict[str, Any]:
    """A copy of a stored job to make a new one of, without settings that are gone."""
    return migrated(spec)[0] if is_first_format(spec) else copy.deepcopy(spec)


def _is_unread(loss: Loss, part: dict[str, Any], name: str, value: Any) -> bool:
    """Returns whether format 0 held a setting only because it held all: at its default, and not read by the loss."""
    if loss.model.reads(name) or name not in ALGORITHM:
        return False
    return bool(value == ALGORITHM[name] or value == _given(part).get(name))


def _given(part: dict[str, Any]) -> dict[str, Any]:
    """Settings of `algorithm` that the named algorithm gives its jobs."""
    algorithm = ALGORITHMS.get(str(part.get("name")))
    defaults = algorithm.defaults if algorithm else {}
    return {name.removeprefix("algorithm."): value for name, value in defaults.items() if name.startswith("algorithm.")}


def _without_removed(spec: dict[str, Any]) -> Iterator[str]:
    """Takes settings out that are gone. What had another value than the default is a reason, or moves to what replaced
    it."""
    if spec["rollout"].get("on_drop") == "count":
        spec["rollout"] |= {"on_drop": "refill", "max_refills": 0}
    for name, default in _removed(spec["algorithm"].get("loss")).items():
        *tables, key = name.split(".")
        value = reduce(dict.__getitem__, tables, spec).pop(key, default)
        if value != default:
            yield _reason(name, value)
    yield from _without_columns(spec["data"])


def _removed(loss: Any) -> dict[str, Any]:
    """`REMOVED` for a job with this loss, by its name."""
    known = LOSSES.get(str(loss))
    given = {name: value for name, value in known.defaults.items() if name in REMOVED} if known else {}
    return REMOVED | BY_LOSS.get(str(loss), {}) | given


def _without_columns(data: dict[str, Any]) -> Iterator[str]:
    sources = data.get("sources", [])
    for key in _OF_SOURCES:
        values = [source.pop(key, None) for source in sources]
        own = [data[key] if value is None else value for value in values]
        if own and all(value == own[0] for value in own):
            data[key] = own[0]
        for number, (value, used) in enumerate(zip(values, own, strict=True)):
            if used != data[key]:
                yield _reason(f"data.sources.{number}.{key}", value)


def _reason(name: str, value: Any) -> str:
    return f"{name} = {value!r} is not in this release ({replacement(name)}): {ADVICE}"
