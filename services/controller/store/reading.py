"""Reads a job's record from the hash that Redis holds of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flowfleet.client.types import Desired, JobRewards, JobStatus, Progress, RewardRevision
from flowfleet.errors import NotFound
from services.controller.store.records import JobRecord, from_epoch

REVISION, ACTIVE, PENDING = "rewards.revision", "rewards.active", "rewards.pending"
SECONDS = "accelerator_s."


def read_record(job_id: str, row: dict[bytes, bytes]) -> JobRecord:
    fields = {name.decode(): value.decode() for name, value in row.items()}
    if "status" not in fields:
        raise NotFound(f"no job {job_id}")
    times: dict[str, Any] = {
        name: from_epoch(float(fields[name])) for name in ("created_at", "started_at", "ended_at") if name in fields
    }
    progress = {
        name.removeprefix("progress."): json.loads(value)
        for name, value in fields.items()
        if name.startswith("progress.")
    }
    return JobRecord(
        id=job_id,
        name=fields["name"],
        owner=fields.get("owner", ""),
        status=JobStatus(fields["status"]),
        desired=Desired(fields["desired"]),
        reason=fields["reason"],
        spec=json.loads(fields["spec"]),
        progress=Progress(**progress),
        results=json.loads(fields.get("results", "{}")),
        archive=fields.get("archive", ""),
        accelerator_hours=hours_of(fields),
        rewards=rewards_of(fields),
        **times,
    )


def rewards_of(fields: Mapping[str, str]) -> JobRewards:
    """From the fields of a job's hash; of a job whose rewards never changed, what was submitted."""
    if (row := fields.get(ACTIVE)) is not None:
        active = RewardRevision.model_validate_json(row)
    else:
        created = from_epoch(float(fields["created_at"]))
        submitted = json.loads(fields["spec"])["rewards"]
        active = RewardRevision(number=0, rewards=submitted, requested_at=created, from_step=0, applied_at=created)
    pending = fields.get(PENDING)
    return JobRewards(
        revision=int(fields.get(REVISION, 0)),
        active=active,
        pending=None if pending is None else RewardRevision.model_validate_json(pending),
    )


def hours_of(fields: Mapping[str, str]) -> dict[str, float]:
    """Component → hours of accelerators, from a job's record."""
    found = {name.removeprefix(SECONDS): float(value) for name, value in fields.items() if name.startswith(SECONDS)}
    return {component: seconds / 3600 for component, seconds in sorted(found.items())}
