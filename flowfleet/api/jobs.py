"""Jobs as the REST API shows them, with their progress, events and checkpoints."""

from datetime import datetime
from html import escape
from typing import Any, Final, Literal

from pydantic import Field

from flowfleet.api.answers import Answer, FiniteOrNone, OpenEnum
from flowfleet.api.rewards import JobRewards, RewardRevision
from flowfleet.part import Strict, rule

MAX_SWEEP: Final = 500
NAME: Final = rule(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", "give up to 63 lowercase letters, digits and '-'")


class JobStatus(OpenEnum):
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


Priority = Literal["low", "normal", "high"]


class Desired(OpenEnum):
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    DELETED = "deleted"  # asked for by the user; the leader archives it first


TERMINAL = tuple(status for status in JobStatus if status.terminal)


class Progress(Answer):
    step: int = 0
    """Training steps finished."""
    steps: int = 0
    """Training steps of the whole job."""
    phase: str = ""
    """rollout, score, advantage, train, publish, checkpoint, validate; empty before the first."""
    samples: int = 0
    """Samples of the step at work, without those that were dropped."""
    samples_sampled: int = 0
    """How many of them are made."""
    samples_scored: int = 0
    """How many of them have their scores."""
    reward: FiniteOrNone = None
    """Mean training reward of the last step."""
    rewards_changed: list[int] = []
    """Steps from which other rewards made up the total than before: rewards on both sides are not comparable."""
    held_out_reward: FiniteOrNone = None
    """Mean reward of the last validation."""
    held_out_best: FiniteOrNone = None
    """Best mean reward of the complete validations by the newest revision of the rewards."""
    images_per_second: FiniteOrNone = None
    eta_s: FiniteOrNone = None
    """Seconds left, estimated."""
    policy_version: int = 0
    samples_trained: int = 0
    samples_dropped: dict[str, int] = {}
    """Reason → number."""
    drop_causes: dict[str, str] = {}
    """Reason → its first cause, in words."""
    warning: str = ""
    """The newest step of which a reward gave more than a tenth of the samples no score; empty without one."""


class AskedSweep(Strict, Answer):
    """A job for each element of `settings`, whose dotted names replace settings of `job`."""

    name: str = Field(pattern=NAME)
    job: dict[str, Any]
    settings: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_SWEEP)
    at_once: int | None = Field(default=None, ge=1)
    """Most of its jobs that run at once; null: no limit of its own."""


class SweepPart(Answer):
    """A job's part in a sweep (docs/sweeps.md): the settings in which its jobs differ, by dotted name."""

    name: str
    settings: dict[str, Any] = {}
    at_once: int | None = None


class Job(Answer):
    """A job."""

    id: str
    name: str
    owner: str = ""
    """Holder of the key that submitted it; empty where the controller has no keys."""
    status: JobStatus
    desired: Desired
    """State that was requested last. The runner brings the job there. A job that pauses itself requests it too."""
    priority: Priority = "normal"
    """How fast the job moves forward in the queue."""
    reason: str = ""
    """Why the status is what it is, where that needs saying."""
    place: int | None = None
    """Jobs before it in the queue; null unless it waits there, and in lists."""
    starts_in_s: FiniteOrNone = None
    """Seconds until it starts, estimated from what the jobs that run have left."""
    created_at: datetime
    started_at: datetime | None = None
    """First time that the job ran."""
    ended_at: datetime | None = None
    spec: dict[str, Any] = {}
    """The job as submitted, defaults filled in; empty in lists."""
    sweep: SweepPart | None = None
    warnings: list[str] = []
    """Settings that are valid but probably not intended, one sentence each."""
    progress: Progress = Progress()
    results: dict[str, Any] = {}
    """Name → path or figure, written when the job ends."""
    archive: str = ""
    """Folder of its archive, once that is complete."""
    trace_url: str = ""
    """Path that leads to a step's trace, with the step in place of {step}; empty where the controller has no address of
    traces."""
    accelerator_hours: dict[str, float] = {}
    """rollout and trainer → hours of accelerators so far; on CPUs hours of processes."""
    rewards: JobRewards = JobRewards(active=RewardRevision(number=0, rewards={}))
    """Current rewards, and the requested ones; empty in lists."""

    @property
    def ended(self) -> bool:
        return self.status.terminal

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        progress = self.progress
        facts = {
            "id": self.id,
            "status": f"{self.status}: {self.reason}" if self.reason else self.status,
            "step": f"{progress.step} of {progress.steps}",
            "reward": progress.reward,
            "held-out reward": progress.held_out_reward,
            **{f"result {name}": value for name, value in self.results.items()},
        }
        known = {name: f"{value:.3f}" if isinstance(value, float) else value for name, value in facts.items()}
        cells = ((escape(name), escape(str(value))) for name, value in known.items() if value)
        rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in cells)
        return f"<table><caption>{escape(self.name)}</caption>{rows}</table>"


class JobEvent(Answer):
    id: str
    """Id in the event stream, ascending; send it as Last-Event-ID to continue after it."""
    type: str
    """status, progress, trained, validation, request, …"""
    time: datetime
    data: dict[str, Any]

    @property
    def final(self) -> bool:
        """Nothing follows: the job has ended."""
        return self.type == "status" and JobStatus(self.data["status"]).terminal


class MetricsRow(Answer):
    step: int
    values: dict[str, FiniteOrNone]


class Checkpoint(Answer):
    step: int
    """Training steps that it covers."""
    path: str
    created_at: datetime
    size_bytes: int | None = None
