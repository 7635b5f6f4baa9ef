"""Installed packages of each extra, against the versions that it accepts."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from flowfleet.cli.doctor.finding import Finding, note, ok, problem
from flowfleet.extras import pip_install

if TYPE_CHECKING:
    from packaging.requirements import Requirement

EXTRAS: Final = ("local", "vllm-omni", "hub", "data", "wandb", "tensorboard", "mlflow", "trackio")
"""Extras that are looked at; `local` holds those of every service."""


def look_at_packages() -> Iterator[Finding]:
    """Yields a finding per extra. A base install cannot tell them apart and yields one."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        yield problem("extra local", "not installed: only the client and the command line are", pip_install("local"))
        return
    required = [Requirement(line) for line in importlib.metadata.requires("flowfleet") or ()]
    for extra in EXTRAS:
        parts = _parts(extra, required)
        yield _extra(extra, [req for req in required if req.name != "flowfleet" and _is_of(req, parts)])


def _extra(extra: str, required: Sequence[Requirement]) -> Finding:
    versions = {req.name: _version(req.name) for req in required}
    wrong = [
        f"{req.name} {version} (needs {req.specifier})"
        for req in required
        if (version := versions[req.name]) is not None and not req.specifier.contains(version, prereleases=True)
    ]
    absent = [name for name, version in versions.items() if version is None]
    if wrong and not absent:
        return problem(f"extra {extra}", f"versions that it does not accept: {', '.join(wrong)}", pip_install(extra))
    if not absent:
        return ok(f"extra {extra}", ", ".join(f"{name} {version}" for name, version in versions.items()))
    missing = f"not installed: {', '.join(absent)}"
    if extra == "local":
        return problem("extra local", missing, pip_install(extra))
    return note(f"extra {extra}", missing, f"{pip_install(extra)}, if you need it")


def _parts(extra: str, required: Sequence[Requirement]) -> set[str]:
    """The extra, the extras that it names as flowfleet[…], those of these, and so on."""
    extras, todo = set[str](), {extra}
    while todo:
        extras |= todo
        todo = {part for req in required if req.name == "flowfleet" and _is_of(req, todo) for part in req.extras}
        todo -= extras
    return extras


def _is_of(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is not None and "extra" in str(marker) and any(marker.evaluate({"extra": extra}) for extra in extras)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
