"""What the REST API answers: one schema for the controller, its OpenAPI page and the client.

The controller forbids unknown fields; the client ignores those of newer controllers (`read`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from html import escape
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

Purpose = Literal["train", "validate"]
EXTENSIONS: Final = {
    "image/png": "png",
    "image/jpeg": "jpg",
    "image/webp": "webp",
    "video/mp4": "mp4",
    "text/plain": "txt",
}
"""Media type of a sample → ending of its file's name."""


class OpenEnum(StrEnum):
    """A StrEnum that keeps values of other releases: they are members without a name, and in no list of members."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        return member

    @property
    def known(self) -> bool:
        """This release has the value."""
        return self.value in type(self)._value2member_map_


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


class Desired(OpenEnum):
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"
    DELETED = "deleted"  # asked for by the user; the leader archives it first


TERMINAL = tuple(status for status in JobStatus if status.terminal)


class Right(StrEnum):
    """What an API key may do, ascending: each includes those before it."""

    LOOK = "look"  # read everything
    VOTE = "vote"  # judge samples as well
    STEER = "steer"  # submit, steer and delete jobs as well


class Health(StrEnum):
    """Health of a replica, as the controller sees it."""

    UNKNOWN = "unknown"  # it says nothing that we know
    IDLE = "idle"  # alive without verified weights
    SERVING = "serving"  # takes prompts of its job and version
    UPDATING = "updating"  # weights in flight
    DRAINING = "draining"  # finishes its work and takes no more
    LOST = "lost"  # does not answer


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


FiniteOrNone = Annotated[float | None, BeforeValidator(_finite)]
"""JSON has no NaN and no infinity: they are shown as null."""


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


A = TypeVar("A", bound=Answer)


def read(kind: type[A], data: Any) -> A:
    """An answer of a controller that may be newer, as JSON text or as what was read from it."""
    if isinstance(data, str | bytes):
        return kind.model_validate_json(data, extra="ignore")
    return kind.model_validate(data, extra="ignore")


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
    held_out_reward: FiniteOrNone = None
    """Mean reward of the last validation."""
    images_per_second: FiniteOrNone = None
    eta_s: FiniteOrNone = None
    """Seconds left, estimated."""
    policy_version: int = 0
    samples_trained: int = 0
    samples_dropped: dict[str, int] = {}
    """Reason → number."""


class RewardRevision(Answer):
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


class JobRewards(Answer):
    revision: int = 0
    """Number of the newest one, pending or not: a change names it."""
    active: RewardRevision
    pending: RewardRevision | None = None
    """What the steps that are not open yet will have."""

    @property
    def newest(self) -> RewardRevision:
        return self.pending or self.active


class Job(Answer):
    """A job."""

    id: str
    name: str
    owner: str = ""
    """Holder of the key that submitted it; empty where the controller has no keys."""
    status: JobStatus
    desired: Desired
    """What was asked for last. The runner brings the job there. A job that pauses itself asks for it too."""
    reason: str = ""
    """Why the status is what it is, where that needs saying."""
    created_at: datetime
    started_at: datetime | None = None
    """First time that the job ran."""
    ended_at: datetime | None = None
    spec: dict[str, Any] = {}
    """The job as submitted, defaults filled in; empty in lists."""
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


class Sample(Answer):
    step: int = Field(ge=0)
    group: int = Field(ge=0)
    index: int = Field(ge=0)
    purpose: Purpose = "train"
    prompt: str
    source: str = ""
    """Name of the prompt's source; empty where the job has `data.train`."""
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
    media_type: str = "image/png"
    replica: str = ""
    """Replica that made it."""

    _shown: _Shown = PrivateAttr(default_factory=lambda: _Shown())

    def showing(self, image: Callable[[], Any]) -> Sample:
        """The sample itself, whose `image` now gives what this call gives."""
        self._shown = _Shown(image)
        return self

    def image(self) -> Any:
        """The decoded picture (PIL, RGB) of a sample that a client gave; `await` it from an AsyncClient. ValueError for
        a video, and for a sample of another origin."""
        if self._shown.image is None:
            raise ValueError("only samples that a client gave know their picture: call the client's `image`")
        return self._shown.image()


@dataclass
class _Shown:
    """Has no part in comparing samples: all of these are equal."""

    image: Callable[[], Any] | None = field(default=None, compare=False)


class ReplicaView(Answer):
    """A rollout replica as the controller sees it."""

    model_config = ConfigDict(from_attributes=True)

    replica_id: str
    address: str
    pool: str
    incarnation: str
    """New at every start of the process."""
    health: Health
    job_id: str
    version: int | None
    """Policy version whose weights it verified; null while it serves none."""
    outstanding: int
    """Samples asked for and not finished."""
    samples_total: int
    device: str
    lag: int | None = None
    """Versions of its job that are newer than its own; null while it serves none."""


class Shortage(Answer):
    component: str
    """rollout, reward or redis."""
    name: str
    reason: str


class RewardLoad(Answer):
    """Calls of a reward over the last minutes, as the controller that runs jobs sees them."""

    in_flight: int
    """Calls that wait for an answer now."""
    calls: int
    """Calls that ended."""
    failures: int
    """Calls of them that failed."""
    latency_p50_s: FiniteOrNone = None
    """Median seconds from call to answer."""
    latency_p99_s: FiniteOrNone = None


class Fleet(Answer):
    replicas: list[ReplicaView]
    rewards: dict[str, list[str]]
    """Name → addresses of the replicas that are ready; none while there is no replica."""
    reward_load: dict[str, RewardLoad] = {}
    """Name → its calls; rewards without recent calls are missing."""
    pools: list[str] | None
    """Names of the rollout pools; null if any name is accepted."""
    shortages: list[Shortage]
    """Pools and rewards whose pods cannot run, and a Redis that lost writes or takes none, each with the reason."""


class SettingProblem(Answer):
    setting: str
    """Dotted name in the request."""
    detail: str
    """What is wrong and what to change."""


class Problem(Answer):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str
    errors: list[SettingProblem] | None = None


class Upload(Answer):
    """A prompt file that the controller keeps."""

    place: str
    """Names it in a job's data: `upload:SHA256/NAME`."""
    size_bytes: int


class Session(Answer):
    """Who asks, and what they may do."""

    login: bool
    """Whether the controller asks for an API key."""
    name: str = ""
    """Holder of the key."""
    may: Right | None = None
    """Null without a valid key or session."""
    expires_at: datetime | None = None
    """End of a browser's session."""


class ApiError(Exception):
    """The API refused a request (application/problem+json), or could not be reached (`status` 0)."""

    def __init__(self, status: int, detail: str, problems: tuple[SettingProblem, ...] = ()) -> None:
        super().__init__("\n".join([detail, *(f"  {problem.detail}" for problem in problems)]))
        self.status = status
        self.detail = detail
        self.problems = problems


class Distribution(Answer):
    """Distribution of one reward's scores, and of its calls."""

    mean: FiniteOrNone = None
    std: FiniteOrNone = None
    min: FiniteOrNone = None
    q05: FiniteOrNone = None
    q25: FiniteOrNone = None
    q50: FiniteOrNone = None
    q75: FiniteOrNone = None
    q95: FiniteOrNone = None
    max: FiniteOrNone = None
    zero_std_ratio: FiniteOrNone = None
    latency_p50_s: FiniteOrNone = None
    latency_p99_s: FiniteOrNone = None
    versions: list[str] = []
    """Versions that gave the scores."""


class Comparison(Answer):
    samples: int = 0
    """Scored by both."""
    groups: int = 0
    failed: int = 0
    """Samples that the shadow gave no score."""
    first_step: int | None = None
    last_step: int | None = None
    active: Distribution = Distribution()
    shadow: Distribution = Distribution()
    spearman: FiniteOrNone = None
    """-1 … 1; none with fewer than two samples, or where one of the two always gives the same."""
    agreement: FiniteOrNone = None
    """0 … 1; none without a pair that one of the two orders."""


class ShadowComparison(Answer):
    """A shadow and the reward that it is compared with, with their current settings, over the newest 1024 groups."""

    beside: str
    """The active reward."""
    scored: int = 0
    """Samples that it scored so far, held-out ones too."""
    failed: int = 0
    """Samples that it gave no score."""
    left_out: int = 0
    """Samples that it was not asked about, because it was behind."""
    train: Comparison
    held_out: Comparison


class Rewards(Answer):
    revision: int
    """Number of the newest one, pending or not: a change names it."""
    active: RewardRevision
    """What the steps from `from_step` on have."""
    pending: RewardRevision | None
    """What was asked for, and is not taken up yet."""
    history: list[RewardRevision]
    """What took effect, ascending; 0 is as submitted."""
    comparison: dict[str, ShadowComparison]
    """Comparison by shadow."""
