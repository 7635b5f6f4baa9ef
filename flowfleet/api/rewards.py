"""Revisions of a job's rewards, and how a shadow compares with a reward."""

from datetime import datetime
from typing import Any

from flowfleet.api.answers import Answer, FiniteOrNone


class RewardRevision(Answer):
    """The rewards and shadows of a job from a step on."""

    number: int
    """Ascending; 0 is as submitted. One that was replaced before it took effect is missing."""
    changes: list[str] = []
    """Requested changes, a line each."""
    rewards: dict[str, Any]
    """Name → settings."""
    shadows: dict[str, Any] = {}
    """Name → settings; `for` names the reward that it is compared with."""
    open_steps: bool = False
    """Steps that are open when it takes effect have it too, and their samples are scored again."""
    requested_at: datetime | None = None
    from_step: int | None = None
    """First step that has it; null while it is pending."""
    applied_at: datetime | None = None


class JobRewards(Answer):
    revision: int = 0
    """Number of the newest one, pending or not: a change names it."""
    active: RewardRevision
    pending: RewardRevision | None = None
    """Revision of the steps that are not open yet."""

    @property
    def newest(self) -> RewardRevision:
        return self.pending or self.active


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
    """Revision of the steps from `from_step` on."""
    pending: RewardRevision | None
    """Requested revision that has not taken effect yet."""
    history: list[RewardRevision]
    """Revisions that took effect, ascending; 0 is as submitted."""
    comparison: dict[str, ShadowComparison]
    """Comparison by shadow."""
