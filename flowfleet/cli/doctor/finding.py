"""Finding of one check of the doctor. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class Status(StrEnum):
    OK = "ok"
    NOTE = "note"  # works, or is needed for some tasks only
    PROBLEM = "problem"  # a stack or a job will fail


@dataclass(frozen=True)
class Finding:
    check: str
    status: Status
    found: str
    """State that the check found."""
    advice: str = ""
    """Advice for the user; empty where all is well."""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Status.OK, found)


def note(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Status.NOTE, found, advice)


def problem(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Status.PROBLEM, found, advice)


def as_notes(findings: Iterable[Finding]) -> list[Finding]:
    """Turns problems into notes: a machine that only speaks to a controller elsewhere runs no stack."""
    return [replace(item, status=Status.NOTE) if item.status is Status.PROBLEM else item for item in findings]
