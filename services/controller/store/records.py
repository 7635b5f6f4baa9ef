"""Records of a job: the shapes that the store keeps and the REST API shows.

`status` is the present state, `desired` what the user requested last; the runner moves the first towards the second.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError

from flowfleet.api.answers import Answer, FiniteOrNone
from flowfleet.api.jobs import Desired, Job, JobStatus
from flowfleet.api.rewards import RewardRevision
from flowfleet.api.samples import Sample
from flowfleet.errors import Conflict, OtherFormat
from flowfleet.job.spec import JobSpec
from flowfleet.rewards.changes import RewardSet

FORMAT = 2
"""Format of a job's record, raised when earlier releases must not run the job; 1 where none is stored."""
UNREADABLE = "this release cannot read the job"
NO_PLACE = "its trainer found no place"
ADVICE = "run the release that wrote it, or cancel the job"
Action = Literal["pause", "resume", "cancel", "delete"]
Order = Literal["newest", "oldest", "best", "worst"]


TARGETS: dict[Action, Desired] = {
    "pause": Desired.PAUSED,
    "resume": Desired.RUNNING,
    "cancel": Desired.CANCELLED,
    "delete": Desired.DELETED,
}


def next_desired(status: JobStatus, desired: Desired, action: Action) -> Desired:
    """Desired state after an action; equal to `desired` if it was requested before.

    Raises Conflict if the job has ended otherwise, or a job that is being cancelled must continue.
    """
    target = TARGETS[action]
    if target == Desired.DELETED:
        if not status.terminal:
            raise Conflict(f"the job is {status}: cancel it, wait until it has ended, then delete it")
        return target
    if status == JobStatus.CANCELLED and target == Desired.CANCELLED:
        return desired
    if status.terminal:
        raise Conflict(f"the job has ended as {status}: it cannot {action}; submit it again")
    if desired == Desired.CANCELLED and target != Desired.CANCELLED:
        raise Conflict(f"the job is being cancelled: it cannot {action}")
    return target


class JobRecord(Job):
    """A job as it is stored."""

    _format: int = PrivateAttr(FORMAT)
    _refusal: str = PrivateAttr("")
    """Why this release must not work with the record; empty where it may."""
    _data_bytes: int = PrivateAttr(0)

    @property
    def data_bytes(self) -> int:
        """Size of its prompts on this machine, as its submit read them."""
        return self._data_bytes

    @property
    def pool(self) -> str:
        """Rollout pool that samples for it."""
        return str(self.spec.get("rollout", {}).get("pool", "default"))

    @property
    def is_unreadable(self) -> bool:
        """Its reason says so: the job waits for another release."""
        return is_unreadable(self.reason)

    def checked(self) -> JobRecord:
        """The record itself. Raises OtherFormat where this release cannot read it."""
        if self._refusal:
            raise OtherFormat(self._refusal)
        return self

    def job_spec(self) -> JobSpec:
        """The submitted job. Raises OtherFormat where this release cannot read it."""
        return self.checked()._submitted

    @cached_property
    def _submitted(self) -> JobSpec:
        """Validated once: the submitted job never changes."""
        return read_spec(self.spec, self._format)

    def stored_as(self, format: int, refusal: str, data_bytes: int = 0) -> JobRecord:
        """The record itself, which now knows its format, why it cannot be read, and the size of its data."""
        self._format, self._refusal, self._data_bytes = format, refusal, data_bytes
        return self.model_copy(update={"reason": refusal}) if refusal else self


class Validation(Answer):
    """Validation of one version on the held-out prompts."""

    version: int
    reward: FiniteOrNone
    revision: int = 0
    """Revision of the rewards that scored."""
    values: dict[str, FiniteOrNone] = Field(default_factory=dict)
    """Its row of metrics."""


class SampleRecord(Sample):
    """A sample as the store keeps it."""

    media_uri: str = ""
    media_size_bytes: int = 0
    media_sha256: str = ""


def is_unreadable(reason: str) -> bool:
    """A job with this reason waits for a release that can read it."""
    return reason.startswith(UNREADABLE)


def found_no_place(status: JobStatus, reason: str) -> bool:
    """A job with this status and reason returned to the queue, and lets others of its pool go ahead."""
    return status is JobStatus.QUEUED and reason.startswith(NO_PLACE)


def read_spec(stored: Mapping[str, Any], format: int) -> JobSpec:
    """The job of a stored spec, in the format of its record: stored specs are parsed here alone. Raises OtherFormat."""
    try:
        return JobSpec.model_validate(stored)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        setting = ".".join(map(str, first["loc"]))
        raise OtherFormat(f"{UNREADABLE}: {setting}: {first['msg']}; {ADVICE}") from None


_LATER = ("priority", "pause")
"""Settings that are younger than digests of format 2: at their defaults a job is the one from before."""


def spec_digest(spec: JobSpec) -> str:
    """Digest of the job with its defaults filled in: two files with the same meaning are the same job."""
    settings = spec.model_dump(mode="json")
    for name in _LATER:
        if getattr(spec, name) == JobSpec.model_fields[name].default:
            del settings[name]
    canonical = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def is_upgraded(asked: JobSpec, stored: Mapping[str, Any], format: int) -> bool:
    """The job that is asked for is the one that an earlier release stored: the digest of that one was of other
    settings. The stored model may be the commit of a name."""
    if format >= FORMAT:
        return False
    try:
        before = read_spec(stored, format)
    except OtherFormat:
        return False
    path = asked.model.path if before.model.path.startswith(f"{asked.model.path}@") else before.model.path
    model = before.model.model_copy(update={"path": path})
    return spec_digest(before.model_copy(update={"model": model})) == spec_digest(asked)


def reward_set(revision: RewardRevision) -> RewardSet:
    return RewardSet.model_validate({"rewards": revision.rewards, "shadows": revision.shadows})


def from_epoch(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def submitted_at(job_id: str) -> float:
    """Seconds since the epoch at which an id was made."""
    return (uuid.UUID(job_id).int >> 80) / 1000


def new_job_id(time_ns: int | None = None) -> str:
    """48 bits of milliseconds, 12 bits of the fraction of one (RFC 9562 §6.2 method 3), 62 random bits."""
    milliseconds, rest_ns = divmod(time.time_ns() if time_ns is None else time_ns, 1_000_000)
    fraction = rest_ns * 4096 // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80 | 0x7 << 76 | fraction << 64 | 0b10 << 62 | secrets.randbits(62)
    return str(uuid.UUID(int=value))
