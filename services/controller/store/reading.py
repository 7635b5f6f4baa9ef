"""Reads a job's record from the hash that Redis holds of it, also one that another release wrote.

Unknown fields are ignored. A record whose format is newer, whose status or wish this release does not know, or that has
a broken field is shown with its status as stored and a reason that says so. Nothing else is refused because of it.
"""

import json
import logging
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from flowfleet.api.answers import Answer, read
from flowfleet.api.jobs import Desired, JobStatus, Progress, SweepPart
from flowfleet.api.rewards import JobRewards, RewardRevision
from flowfleet.errors import NotFound, OtherFormat
from services.controller.store.records import ADVICE, FORMAT, UNREADABLE, JobRecord, from_epoch, submitted_at

A = TypeVar("A", bound=Answer)
log = logging.getLogger(__name__)

REVISION, ACTIVE, PENDING = "rewards.revision", "rewards.active", "rewards.pending"
SECONDS = "accelerator_s."
DATA_BYTES = "data_bytes"
_TIMES = ("created_at", "started_at", "ended_at")
_TEXTS = ("name", "owner", "reason", "archive", "priority")
LISTED = (
    *_TEXTS, *_TIMES, "status", "desired", "format", "warnings", "results", "sweep",
    *(f"progress.{name}" for name in Progress.model_fields), f"{SECONDS}rollout", f"{SECONDS}trainer",
)  # fmt: skip
"""Fields of a record that lists show: all but the spec and the rewards."""


def decoded(row: Mapping[bytes, bytes] | Iterable[tuple[str, bytes | None]]) -> dict[str, str]:
    """Fields of a hash, of HGETALL or zipped with the answer of HMGET."""
    pairs = row.items() if isinstance(row, Mapping) else row
    known = ((name, value) for name, value in pairs if value is not None)
    return {name.decode() if isinstance(name, bytes) else name: value.decode() for name, value in known}


def read_record(job_id: str, fields: Mapping[str, str], *, whole: bool = True) -> JobRecord:
    """Not `whole`: of a list, without spec and rewards. Raises NotFound without a status."""
    if "status" not in fields:
        raise NotFound(f"no job {job_id}")
    refusal = _refusal(fields)
    try:
        record = _record(job_id, fields, whole)
    except (KeyError, TypeError, ValueError) as error:
        record = _bare(job_id, fields)
        refusal = refusal or f"{UNREADABLE}: {_cause(error)}; {ADVICE}"
    data_bytes = stored if (stored := fields.get(DATA_BYTES, "0")).isdecimal() else "0"
    return record.stored_as(format_of(fields.get("format")), refusal, int(data_bytes))


def row_of(kind: type[A], row: Any) -> A:
    """Raises OtherFormat for a row of another release that this one cannot read; unknown fields are ignored."""
    try:
        return read(kind, row)
    except (ValidationError, TypeError) as error:
        raise OtherFormat(f"this release cannot read a stored {kind.__name__}: {_cause(error)}; {ADVICE}") from None


def rows_of(kind: type[A], rows: Iterable[Any]) -> list[A]:
    """The rows without those that this release cannot read."""
    found, refusals = [], []
    for row in rows:
        try:
            found.append(row_of(kind, row))
        except OtherFormat as error:
            refusals.append(error)
    if refusals:
        log.warning("left out %d stored rows: %s", len(refusals), refusals[0])
    return found


def format_of(stored: str | None) -> int:
    """Format of a record; a later one than any where it is not a number."""
    return int(stored) if (stored := stored or "1").isdecimal() else sys.maxsize


def _refusal(fields: Mapping[str, str]) -> str:
    if format_of(fields.get("format")) > FORMAT:
        return f"{UNREADABLE}: its record has the format {fields['format']}, and this release reads {FORMAT}; {ADVICE}"
    for name, value in (("status", JobStatus(fields["status"])), ("desired", Desired(fields.get("desired", "")))):
        if not value.known:
            return f"{UNREADABLE}: {name} = {value.value!r} is of another release; {ADVICE}"
    return ""


def _record(job_id: str, fields: Mapping[str, str], whole: bool) -> JobRecord:
    progress = {
        name.removeprefix("progress."): json.loads(value)
        for name, value in fields.items()
        if name.startswith("progress.")
    }
    rest: dict[str, Any] = {name: fields[name] for name in _TEXTS if name in fields}
    rest |= {name: from_epoch(float(fields[name])) for name in _TIMES if name in fields}
    if whole:
        rest |= {"spec": json.loads(fields["spec"]), "rewards": rewards_of(fields)}
    return JobRecord(
        id=job_id,
        status=JobStatus(fields["status"]),
        desired=Desired(fields["desired"]),
        progress=read(Progress, progress),
        results=json.loads(fields.get("results", "{}")),
        sweep=read(SweepPart, fields["sweep"]) if "sweep" in fields else None,
        warnings=json.loads(fields.get("warnings", "[]")),
        accelerator_hours=hours_of(fields),
        **rest,
    )


def _bare(job_id: str, fields: Mapping[str, str]) -> JobRecord:
    return JobRecord(
        id=job_id,
        name=fields.get("name", ""),
        owner=fields.get("owner", ""),
        status=JobStatus(fields["status"]),
        desired=Desired(fields.get("desired", "")),
        created_at=from_epoch(submitted_at(job_id)),
    )


def _cause(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return f"its record lacks {error}" if isinstance(error, KeyError) else f"its record is damaged: {error}"


def rewards_of(fields: Mapping[str, str]) -> JobRewards:
    """From the fields of a job's hash; of a job whose rewards never changed, what was submitted."""
    if (row := fields.get(ACTIVE)) is not None:
        active = read(RewardRevision, row)
    else:
        created = from_epoch(float(fields["created_at"]))
        submitted = json.loads(fields["spec"])["rewards"]
        active = RewardRevision(number=0, rewards=submitted, requested_at=created, from_step=0, applied_at=created)
    pending = fields.get(PENDING)
    return JobRewards(
        revision=int(fields.get(REVISION, 0)),
        active=active,
        pending=None if pending is None else read(RewardRevision, pending),
    )


def hours_of(fields: Mapping[str, str]) -> dict[str, float]:
    """Component → hours of accelerators, from a job's record."""
    found = {name.removeprefix(SECONDS): float(value) for name, value in fields.items() if name.startswith(SECONDS)}
    return {component: seconds / 3600 for component, seconds in sorted(found.items())}
