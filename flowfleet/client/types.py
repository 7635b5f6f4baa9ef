"""What the REST API answers, as Python values. Unknown fields of newer controllers are ignored."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

TERMINAL = ("succeeded", "failed", "cancelled")


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class Progress(Answer):
    step: int = 0
    """Training steps finished."""
    steps: int = 0
    """Number of steps of the whole job."""
    phase: str = ""
    reward: float | None = None
    """Mean training reward of the last step."""
    held_out_reward: float | None = None
    """Mean reward of the last validation."""
    images_per_second: float | None = None
    eta_s: float | None = None
    """Seconds left, estimated."""
    policy_version: int = 0
    samples_trained: int = 0
    samples_dropped: dict[str, int] = {}
    """Reason → number."""


class RewardRevision(Answer):
    """The rewards and shadows of a job from a step on."""

    number: int
    changes: list[str] = []
    """What was asked for, a line each."""
    rewards: dict[str, dict[str, Any]]
    shadows: dict[str, dict[str, Any]] = {}
    """Name → settings; `for` names the reward that it is compared with."""
    requested_at: datetime | None = None
    from_step: int | None = None
    """First step that has it; none while it is pending."""


class JobRewards(Answer):
    revision: int = 0
    """Number of the newest one, pending or not."""
    active: RewardRevision = RewardRevision(number=0, rewards={})


class Job(Answer):
    id: str
    name: str
    status: str
    """queued, starting, running, paused, succeeded, failed or cancelled."""
    desired: str = ""
    reason: str = ""
    """Why the status is what it is, where that needs saying."""
    created_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    spec: dict[str, Any] = {}
    """The job as submitted, defaults filled in."""
    progress: Progress = Progress()
    results: dict[str, Any] = {}
    """Name → path or figure, once the job has ended."""
    archive: str = ""
    """Folder of its archive, once that is complete."""
    rewards: JobRewards = JobRewards()
    warnings: list[str] = []
    """Settings that are valid but probably not intended, one sentence each."""

    @property
    def ended(self) -> bool:
        return self.status in TERMINAL


class JobEvent(Answer):
    id: str
    type: str
    """status, progress, trained, validation, request, …"""
    time: datetime
    data: dict[str, Any]

    @property
    def final(self) -> bool:
        """Nothing follows: the job has ended."""
        return self.type == "status" and self.data.get("status") in TERMINAL


class MetricsRow(Answer):
    step: int
    values: dict[str, float | None]


class Checkpoint(Answer):
    step: int
    """Training steps that it covers."""
    path: str
    created_at: datetime
    size_bytes: int | None = None


class Sample(Answer):
    step: int
    group: int
    index: int
    purpose: str = "train"
    """train or validate; of a held-out sample, `step` is the policy version and `group` the prompt."""
    prompt: str
    reward: float | None = None
    scores: dict[str, float | None] = {}
    """Reward → score, and reward.component → value."""
    versions: dict[str, str] = {}
    """Reward → scorer and version that gave its score."""
    shadow: dict[str, float | None] = {}
    """Shadow → score; it has no effect."""
    gated_by: str = ""
    """The reward whose gate acted on the sample."""
    policy_version: int = 0
    seed: int = 0
    drop_reason: str = ""
    media_type: str = "image/png"


class Replica(Answer):
    """A rollout process."""

    replica_id: str
    address: str
    pool: str = "default"
    health: str
    job_id: str = ""
    version: int | None = None
    """Policy version whose weights it verified; none while it serves none."""
    outstanding: int = 0
    samples_total: int = 0
    device: str = ""


class Shortage(Answer):
    """Why pods of a pool or a reward cannot run."""

    component: str
    name: str
    reason: str


class Fleet(Answer):
    replicas: list[Replica]
    rewards: dict[str, list[str]] = {}
    """Name → addresses of the replicas that are ready."""
    pools: list[str] | None = None
    """Names of the rollout pools; None if any name is accepted."""
    shortages: list[Shortage] = []


class SettingProblem(Answer):
    setting: str = ""
    detail: str


class ApiError(Exception):
    """The API refused a request (application/problem+json), or could not be reached (`status` 0)."""

    def __init__(self, status: int, detail: str, problems: tuple[SettingProblem, ...] = ()) -> None:
        super().__init__("\n".join([detail, *(f"  {problem.detail}" for problem in problems)]))
        self.status = status
        self.detail = detail
        self.problems = problems


class Distribution(Answer):
    """Distribution of one reward's scores and of its calls; values that cannot be computed are None."""

    mean: float | None = None
    std: float | None = None
    min: float | None = None
    q05: float | None = None
    q25: float | None = None
    q50: float | None = None
    q75: float | None = None
    q95: float | None = None
    max: float | None = None
    zero_std_ratio: float | None = None
    """Share of groups whose scores are all equal."""
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None
    versions: list[str] = []


class Comparison(Answer):
    samples: int = 0
    """Scored by both."""
    groups: int = 0
    failed: int = 0
    first_step: int | None = None
    last_step: int | None = None
    active: Distribution
    shadow: Distribution
    spearman: float | None = None
    agreement: float | None = None
    """Share of the pairs inside groups that both order alike; a pair that only one of them orders counts half."""


class ShadowComparison(Answer):
    beside: str
    """The active reward."""
    scored: int = 0
    failed: int = 0
    left_out: int = 0
    """Samples that it was not asked about, because it was behind."""
    train: Comparison
    held_out: Comparison


class Rewards(Answer):
    revision: int
    """Number of the newest one, pending or not: a change names it."""
    active: RewardRevision
    pending: RewardRevision | None = None
    history: list[RewardRevision] = []
    """What took effect, ascending; 0 is as submitted."""
    comparison: dict[str, ShadowComparison] = {}
    """Comparison by shadow."""
