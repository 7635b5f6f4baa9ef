"""What the controller remembers of a job: the shapes that the store keeps and the REST API shows.

`status` is what is, `desired` is what the user asked for last; the runner moves the first towards the second.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, computed_field

from flowfleet.errors import Conflict
from flowfleet.job.spec import JobSpec
from flowfleet.rewards.changes import RewardSet

Action = Literal["pause", "resume", "cancel", "delete"]
Purpose = Literal["train", "validate"]
Order = Literal["newest", "oldest", "best", "worst"]


class JobStatus(StrEnum):
    QUEUED = "queued"  # accepted, nothing started
    STARTING = "starting"  # trainer and replicas are being made ready, first time or after a fault
    RUNNING = "running"  # steps advance
    PAUSED = "paused"  # no new step starts until resume
    QUARANTINED = "quarantined"  # it stopped the controller several times; it is not driven until resume
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)


class Desired(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    DELETED = "deleted"  # asked for by the user; the leader archives it first


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


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


FiniteOrNone = Annotated[float | None, BeforeValidator(_finite)]
"""JSON has no NaN and no infinity: they are shown as null."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Progress(Record):
    step: int = 0
    """Training steps finished."""
    steps: int = 0
    """Training steps of the whole job."""
    phase: str = ""
    """rollout, score, advantage, train, publish, checkpoint, validate; empty before the first."""
    reward: FiniteOrNone = None
    """Mean training reward of the last step."""
    held_out_reward: FiniteOrNone = None
    """Mean reward of the last validation."""
    images_per_second: FiniteOrNone = None
    eta_s: FiniteOrNone = None
    """Seconds left, estimated."""
    policy_version: int = 0
    samples_trained: int = 0
    samples_dropped: dict[str, int] = {}
    """Reason → number."""


class RewardRevision(Record):
    """The rewards and shadows of a job from a step on."""

    number: int
    """Ascending; 0 is as submitted. One that was replaced before it took effect is missing."""
    changes: list[str] = []
    """What was asked for, a line each."""
    rewards: dict[str, Any]
    """Name → settings."""
    shadows: dict[str, Any] = {}
    """Name → settings; `for` names the reward that it is compared with."""
    requested_at: datetime | None = None
    from_step: int | None = None
    """First step that has it; null while it is pending."""
    applied_at: datetime | None = None

    def as_set(self) -> RewardSet:
        return RewardSet.model_validate({"rewards": self.rewards, "shadows": self.shadows})


class JobRewards(Record):
    revision: int = 0
    """Number of the newest one, pending or not: a change names it."""
    active: RewardRevision
    pending: RewardRevision | None = None
    """What the steps that are not open yet will have."""

    @property
    def newest(self) -> RewardRevision:
        return self.pending or self.active


class JobRecord(Record):
    id: str
    name: str
    status: JobStatus
    desired: Desired
    """What was asked for last. The runner brings the job there. A job that pauses itself asks for it too."""
    reason: str = ""
    """Why the status is what it is, where that needs saying."""
    created_at: datetime
    started_at: datetime | None = None
    """First time that the job ran."""
    ended_at: datetime | None = None
    spec: dict[str, Any]
    """The job as submitted, defaults filled in."""
    progress: Progress = Progress()
    results: dict[str, Any] = {}
    """Name → path or figure, written when the job ends."""
    archive: str = ""
    """Folder of its archive, once that is complete."""
    rewards: JobRewards = JobRewards(active=RewardRevision(number=0, rewards={}))
    """Current rewards, and the requested ones."""

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


class JobEvent(Record):
    id: str
    """Id in the event stream, ascending; send it as Last-Event-ID to continue after it."""
    type: str
    time: datetime
    data: dict[str, Any]

    @property
    def final(self) -> bool:
        """Nothing follows: the job has ended."""
        return self.type == "status" and JobStatus(self.data["status"]).terminal


class MetricsRow(Record):
    step: int
    values: dict[str, FiniteOrNone]


class Checkpoint(Record):
    step: int
    """Training steps that it covers."""
    path: str
    created_at: datetime
    size_bytes: int | None = None


class Validation(Record):
    """What the held-out prompts gave at one version."""

    version: int
    reward: FiniteOrNone
    revision: int = 0
    """Revision of the rewards that scored."""
    values: dict[str, FiniteOrNone] = {}
    """Its row of metrics."""


class SampleRecord(Record):
    step: int = Field(ge=0)
    group: int = Field(ge=0)
    index: int = Field(ge=0)
    purpose: Purpose = "train"
    prompt: str
    reward: FiniteOrNone = None
    """Total of the scores, as weights, clips, curves and gates have it; null when the sample was dropped."""
    scores: dict[str, FiniteOrNone] = {}
    """Reward → raw score, and reward.component → value. A reward that was skipped has none."""
    versions: dict[str, str] = {}
    """Reward → name and version of the scorer that gave its score."""
    shadow: dict[str, FiniteOrNone] = {}
    """Shadow → raw score."""
    gated_by: str = ""
    """The reward whose gate acted on the sample."""
    policy_version: int = 0
    seed: int = 0
    drop_reason: str = ""
    """Why the sample was not trained on; empty when it was."""
    media_uri: str = ""
    media_size_bytes: int = 0
    media_sha256: str = ""
    media_type: str = "image/png"


def from_epoch(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
