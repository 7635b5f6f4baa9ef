"""Installed packages of each extra, against the versions that it accepts."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from flowfleet.cli.doctor.finding import Finding, note, ok, problem

if TYPE_CHECKING:
    from packaging.requirements import Requirement

EXTRAS: Final = ("local", "vllm-omni", "hub", "data", "wandb", "tensorboard", "mlflow", "trackio")
"""Extras that are looked at; `local` holds those of every service."""


def look_at_packages() -> Iterator[Finding]:
    """Yields a finding per extra. A base install cannot tell them apart and yields one."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        yield problem("extra local", "not installed: only the client and the command line are", _install("local"))
        return
    required = [Requirement(line) for line in importlib.metadata.requires("flowfleet") or ()]
    for extra in EXTRAS:
        parts = _parts(extra, required)
        yield _extra(extra, [one for one in required if one.name != "flowfleet" and _is_of(one, parts)])


def _extra(extra: str, required: Sequence[Requirement]) -> Finding:
    versions = {one.name: _version(one.name) for one in required}
    wrong = [
        f"{one.name} {version} (needs {one.specifier})"
        for one in required
        if (version := versions[one.name]) is not None and not one.specifier.contains(version, prereleases=True)
    ]
    absent = [name for name, version in versions.items() if version is None]
    if wrong and not absent:
        return problem(f"extra {extra}", f"versions that it does not accept: {', '.join(wrong)}", _install(extra))
    if not absent:
        return ok(f"extra {extra}", ", ".join(f"{name} {version}" for name, version in versions.items()))
    found = f"not installed: {', '.join(absent)}"
    if extra == "local":
        return problem("extra local", found, _install(extra))
    return note(f"extra {extra}", found, f"{_install(extra)}, if you need it")


def _install(extra: str) -> str:
    return f"pip install 'flowfleet[{extra}]'"


def _parts(extra: str, required: Sequence[Requirement]) -> set[str]:
    """The extra, the extras that it names as flowfleet[…], those of these, and so on."""
    found, todo = set[str](), {extra}
    while todo:
        found |= todo
        todo = {part for one in required if one.name == "flowfleet" and _is_of(one, todo) for part in one.extras}
        todo -= found
    return found


def _is_of(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is not None and "extra" in str(marker) and any(marker.evaluate({"extra": one}) for one in extras)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
