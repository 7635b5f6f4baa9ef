"""Events of a job. They are facts: recorded first (ledger.py), then folded into the state by `state_machine.Machine`.

`at` is the controller's clock in Unix seconds, stamped by the driver, so that folding a ledger again gives the same
state.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from flowfleet.rewards.changes import RewardSet


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    at: float = 0.0


class TrainerReady(_Event):
    """A trainer is configured and holds the weights of a version."""

    kind: Literal["trainer_ready"] = "trainer_ready"
    version: int


class TrainerLost(_Event):
    """The trainer died or cannot be reached."""

    kind: Literal["trainer_lost"] = "trainer_lost"


class Rewound(_Event):
    """No checkpoint is left from which the trainer could repeat its steps: those from `version` on are repeated."""

    kind: Literal["rewound"] = "rewound"
    version: int
    samples: int
    """Samples that this version was trained on."""


class ReplicaBehind(_Event):
    """A live replica does not serve the published version: it is new, or it restarted."""

    kind: Literal["replica_behind"] = "replica_behind"


class Sampled(_Event):
    """A trajectory arrived."""

    kind: Literal["sampled"] = "sampled"
    step: int
    group: int
    index: int
    version: int
    digest: str = ""
    """Digest of the weights that sampled it; empty if its rollout does not report one."""


class Scored(_Event):
    """A sample has its reward, a finite weighted sum, and what it is the sum of."""

    kind: Literal["scored"] = "scored"
    step: int
    group: int
    index: int
    score: float
    scores: dict[str, float] = {}
    """Reward → score, not weighted; empty in ledgers from before it was kept."""
    reference_kl: float = 0.0
    """The sample's KL as its rollout measured it; 0 where it did not, and in ledgers that are older than the field."""


class Dropped(_Event):
    """A sample will not be trained on, and why."""

    kind: Literal["dropped"] = "dropped"
    step: int
    group: int
    index: int
    reason: str
    cause: str = ""
    """Error in words; empty where the reason says all."""
    refill: bool = True
    """Allows another sample in its place."""


class Lost(_Event):
    """A blob of a sample is gone or broken. The sample is made again, or its trained step is replayed without it."""

    kind: Literal["lost"] = "lost"
    step: int
    group: int
    index: int


class AdvantagesReady(_Event):
    """The TrainStep request of a step is stored."""

    kind: Literal["advantages_ready"] = "advantages_ready"
    step: int
    num_samples: int | None = None
    """Samples that it holds; none, in ledgers from before it was kept: all that have a score."""
    figures: dict[str, float] = {}
    """Metrics of the step's rewards and advantages; none in ledgers from before they were kept."""
    spread: dict[str, dict[str, Any]] = {}
    """Histograms of them."""


class Trained(_Event):
    """The trainer applied a step, or gave its record of it."""

    kind: Literal["trained"] = "trained"
    step: int
    log_prob_gap: float | None = None
    """Mean |trainer's - rollout's log-prob| over its rows; none for losses that read no log-probs, and where no row has
    a finite one."""
    log_prob_not_finite: float = 0.0
    """Share of rows without a finite gap; 0 in ledgers from before it was kept."""
    taught_nothing: bool = False
    """True if no update of the step was applied, because no gradient was finite."""
    lineage: str = ""
    """Lineage of the version that the step made (flowfleet/data/lineage.py); empty in ledgers older than lineages."""


class Published(_Event):
    """Replicas verified a version: rollouts, then the trainer's own ranks where these sample as well."""

    kind: Literal["published"] = "published"
    version: int
    evaluated: bool = False
    """True for the version's evaluated weights; else those that sample."""
    digest: str = ""
    """Digest of the weights; empty in ledgers older than digests."""


class Checkpointed(_Event):
    kind: Literal["checkpointed"] = "checkpointed"
    version: int


class Validated(_Event):
    kind: Literal["validated"] = "validated"
    version: int
    reward: float | None
    """Mean over the held-out prompts; none where no prompt could be scored."""
    disagreement: float | None = None
    """How far the job's reward and a watched one have parted (validation_limits.py); none where it watches none."""
    parted: str = ""
    """The watched reward."""
    reward_drop: float | None = None
    """How far the reward has fallen since its best (validation_limits.py); none without a reward."""
    best: int = 0
    """The version of that best."""


class Exported(_Event):
    kind: Literal["exported"] = "exported"


class RewardsChanged(_Event):
    """The job has other rewards or shadows, from the first step on that is not open yet."""

    kind: Literal["rewards_changed"] = "rewards_changed"
    number: int
    """Number of the revision, ascending; folding one again changes nothing."""
    set: RewardSet
    unscored: bool = False
    """Open steps of which no sample is scored have it too: the job is paused, and nothing is being scored. False in
    ledgers from before that could be."""
    open_steps: bool = False
    """Open steps whose request is not stored yet have it as well: their samples are scored again."""


class StepsChanged(_Event):
    """The job has this many training steps in all, but at least those that are done or may be at the trainer: 0
    finishes it."""

    kind: Literal["steps_changed"] = "steps_changed"
    steps: int


class PauseRequested(_Event):
    kind: Literal["pause_requested"] = "pause_requested"
    reason: str = ""
    """Why the job itself asks for it."""
    step: int | None = None
    """The step whose drops are why: resumed, the job trains on what is left of it."""


class ResumeRequested(_Event):
    kind: Literal["resume_requested"] = "resume_requested"


class CancelRequested(_Event):
    kind: Literal["cancel_requested"] = "cancel_requested"


class Failed(_Event):
    """The job cannot continue, and why."""

    kind: Literal["failed"] = "failed"
    reason: str


Event = (
    TrainerReady | TrainerLost | Rewound | ReplicaBehind | Sampled | Scored | Dropped | Lost | AdvantagesReady | Trained
    | Published | Checkpointed | Validated | Exported | RewardsChanged | StepsChanged | PauseRequested
    | ResumeRequested | CancelRequested | Failed
)  # fmt: skip

VOLATILE = (TrainerReady, TrainerLost, ReplicaBehind)
"""Facts about processes, rediscovered by a restarted controller: never recorded."""

_adapter: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


def event_to_json(event: Event) -> bytes:
    return event.model_dump_json().encode()


def event_from_json(data: bytes) -> Event:
    return _adapter.validate_json(data)
