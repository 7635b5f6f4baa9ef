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


def why_held(jobs: Sequence[EndedJob], keep: Keep, now: float, own: float) -> str:
    """Why the limits must remove nothing until an operator has looked; empty where they may. `now` is by Redis, `own`
    by this controller: an age by a wrong clock deletes history, and two clocks of one machine are wrong together."""
    if abs(now - own) > MAX_SKEW_S:
        return (
            f"Redis's clock says {_utc(now)} and this controller's {_utc(own)}: limits remove no ended job until the "
            "wrong one is set right"
        )
    left = [job for job in jobs if not job.wanted_gone]
    old = sum(_is_old(job, keep, now) for job in left)
    if keep.days == 0 or old <= len(left) / 2:
        return ""
    return (
        f"{old} of {len(left)} ended jobs are older than {keep.days:g} days at {_utc(now)}, and more than half go only "
        "by an operator's word: set the clock right if it is wrong, else run `flowfleet delete --before "
        f"{_utc(now - keep.days * DAY_S)}`"
    )


def to_remove(jobs: Sequence[EndedJob], sizes: Mapping[str, int], keep: Keep, now: float) -> dict[str, str]:
    """Job → why it goes. `jobs` as `Removal.ended` gives them; `sizes`: bytes, of those known."""
    gone: dict[str, str] = {}
    for job in jobs:
        if job.wanted_gone:
            gone[job.job_id] = "was deleted"
        elif _is_old(job, keep, now):
            gone[job.job_id] = f"was removed {keep.days:g} days after its end"
    left = [job.job_id for job in jobs if job.job_id not in gone]
    surplus = max(0, len(left) - keep.jobs)
    gone |= dict.fromkeys(left[:surplus], f"was removed: the newest {keep.jobs} ended jobs are kept")
    left = left[surplus:]
    total = sum(sizes.get(job_id, 0) for job_id in left)
    for job_id in left:
        if total <= keep.gib * 2**30:
            break
        gone[job_id] = f"was removed: ended jobs are kept up to {keep.gib:g} GiB"
        total -= sizes.get(job_id, 0)
    return gone


def _is_old(job: EndedJob, keep: Keep, now: float) -> bool:
    return now - job.ended_at > keep.days * DAY_S


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
