"""What the controller remembers of a job: the shapes that the store keeps and the REST API shows.

`status` is what is, `desired` is what the user asked for last; the runner moves the first towards the second.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from pydantic import Field, computed_field

from flowfleet.client.types import Answer, Desired, FiniteOrNone, JobFields, JobStatus, RewardRevision, Sample
from flowfleet.errors import Conflict
from flowfleet.job.spec import JobSpec
from flowfleet.rewards.changes import RewardSet

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


class JobRecord(JobFields):
    @computed_field  # type: ignore[prop-decorator]
    @property
    def warnings(self) -> list[str]:
        """Settings that are valid but probably not intended, one sentence each."""
        try:
            return self.job_spec().warnings
        except ValueError:  # of an older release, or of a plugin that is not installed
            return []

    @property
    def pool(self) -> str:
        """Rollout pool that samples for it."""
        return str(self.spec["rollout"].get("pool", "default"))

    def job_spec(self) -> JobSpec:
        return JobSpec.model_validate(self.spec)


class Validation(Answer):
    """What the held-out prompts gave at one version."""

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


def reward_set(revision: RewardRevision) -> RewardSet:
    return RewardSet.model_validate({"rewards": revision.rewards, "shadows": revision.shadows})


def from_epoch(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
