"""Limits of the ended jobs that stay in Redis, and the use of its memory above which jobs wait. Pure.

A job that has not ended is never touched. Among ended jobs, the first to end go first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.controller.store.removal import EndedJob

DAY_S = 86_400.0
MAX_SKEW_S = 3600.0
"""Largest difference of two clocks of which both can be right enough."""
MANY = 10
"""Limits that remove fewer jobs at once never wait: a small fleet's only job may be old."""
REMOVED = frozenset({"detail_days", "events", "metrics", "samples"})
"""Limits of the last release."""


class Keep(BaseModel):
    """The operator's limits; `--keep NAME=VALUE` sets one. Raises ValueError for limits that contradict each other."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    jobs: int = Field(default=1000, ge=0)
    """Most ended jobs."""
    days: float = Field(default=90.0, ge=0.0, allow_inf_nan=False)
    """Longest time that an ended job stays."""
    gib: float = Field(default=16.0, ge=0.0, allow_inf_nan=False)
    """Most GiB of Redis that the histories of ended jobs take together; never more than half of what submits may
    fill."""
    folder_days: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Days that the folder (checkpoints, models, logs) of a job that this Redis removed stays. Unset: until somebody
    removes it."""
    refuse_above: float = Field(default=0.8, gt=0.0, le=1.0)
    """Share of Redis's memory above which submits are refused."""
    pause_above: float = Field(default=0.9, gt=0.0, le=1.0)
    """Share of Redis's memory above which running jobs pause."""

    @model_validator(mode="after")
    def _refuses_first(self) -> Keep:
        if self.refuse_above > self.pause_above:
            raise ValueError(
                f"--keep refuse_above={self.refuse_above:g} must not be greater than pause_above={self.pause_above:g}: "
                "a new job must not be accepted while running ones pause"
            )
        return self

    def within(self, limit: int) -> Keep:
        """These limits for a Redis of `limit` bytes: ended jobs must go before new ones are refused for them."""
        return self.model_copy(update={"gib": min(self.gib, limit * self.refuse_above / 2 / 2**30)})


def clocks_differ(now: float, own: float) -> str:
    """Why the limits must remove nothing; empty where they may. `now` is by Redis, `own` by this controller: an age by
    a wrong clock deletes history."""
    if abs(now - own) <= MAX_SKEW_S:
        return ""
    return (
        f"Redis's clock says {_utc(now)} and this controller's {_utc(own)}: limits remove no ended job until the "
        "wrong one is set right"
    )


def too_many(jobs: Sequence[EndedJob], gone: Mapping[str, str], keep: Keep, now: float) -> str:
    """Why what `to_remove` names must wait until an operator has looked; empty where it may go. Two clocks of one
    machine are wrong together. Limits of 0 are an operator's word already."""
    left = [job for job in jobs if not job.wanted_gone]
    going = [job for job in left if job.job_id in gone]
    if len(going) < MANY or len(going) <= len(left) / 2 or 0 in (keep.jobs, keep.days, keep.gib):
        return ""
    limits = " and ".join(limit for limit, why in _reasons(keep).items() if why in gone.values())
    before = _utc(min(now, max(job.ended_at for job in going) + 1.0))
    return (
        f"Retention is paused: {len(going)} of {len(left)} ended jobs exceed {limits}. Check the clock; to remove them "
        f"run `flowfleet delete --before {before}`."
    )


def to_remove(jobs: Sequence[EndedJob], sizes: Mapping[str, int], keep: Keep, now: float) -> dict[str, str]:
    """Job → why it goes. `jobs` as `Removal.ended` gives them; `sizes`: bytes, of those known."""
    by_days, by_jobs, by_gib = _reasons(keep).values()
    gone: dict[str, str] = {}
    for job in jobs:
        if job.wanted_gone:
            gone[job.job_id] = "was deleted"
        elif _is_old(job, keep, now):
            gone[job.job_id] = by_days
    left = [job.job_id for job in jobs if job.job_id not in gone]
    surplus = max(0, len(left) - keep.jobs)
    gone |= dict.fromkeys(left[:surplus], by_jobs)
    left = left[surplus:]
    total = sum(sizes.get(job_id, 0) for job_id in left)
    for job_id in left:
        if total <= keep.gib * 2**30:
            break
        gone[job_id] = by_gib
        total -= sizes.get(job_id, 0)
    return gone


def _reasons(keep: Keep) -> dict[str, str]:
    """Limit → why a job goes by it."""
    return {
        f"{keep.days:g} days": f"was removed {keep.days:g} days after its end",
        f"{keep.jobs} jobs": f"was removed: the newest {keep.jobs} ended jobs are kept",
        f"{keep.gib:g} GiB": f"was removed: ended jobs are kept up to {keep.gib:g} GiB",
    }


def _is_old(job: EndedJob, keep: Keep, now: float) -> bool:
    return now - job.ended_at > keep.days * DAY_S


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
