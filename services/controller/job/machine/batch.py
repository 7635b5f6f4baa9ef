"""The samples of one step as the state machine keeps them: wanted, sampled, scored or dropped. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PrivateAttr

from flowfleet.job.drop_reasons import DropReason, is_verdict

SampleStatus = Literal["wanted", "sampled", "scored", "dropped"]


class Phase(StrEnum):
    """Where the step stands that is next to train."""

    STARTING = "starting"  # no trainer yet, or no replica has the first weights
    ROLLOUT = "rollout"  # samples are being made; finished groups are scored meanwhile
    SCORE = "score"  # every sample is in, scores are missing
    ADVANTAGE = "advantage"  # every score is in
    TRAIN = "train"  # the trainer updates, or replays steps after a restart
    PUBLISH = "publish"  # replicas take the new version
    CHECKPOINT = "checkpoint"  # the trainer saves
    VALIDATE = "validate"  # held-out prompts are sampled and scored
    EXPORT = "export"  # the trained model is written
    DONE = "done"


_NO_SCORES: dict[str, float] = {}


@dataclass(slots=True)
class SampleState:
    """State of one sample: wanted → sampled → scored, or dropped. Its batch changes the status (`Batch.move`)."""

    status: SampleStatus = "wanted"
    version: int | None = None
    score: float | None = None
    scores: dict[str, float] = field(default_factory=lambda: _NO_SCORES)
    """Reward → score, not weighted."""
    reference_kl: float = 0.0
    times_lost: int = 0
    """How often a blob of it was lost, so that it was wanted again."""
    reason: str = ""
    """Why it was dropped."""


@dataclass(frozen=True)
class Scored:
    """A sample that has its reward."""

    group: int
    index: int
    score: float
    """The weighted sum."""
    scores: dict[str, float] = field(default_factory=dict)
    """Reward → score, not weighted; empty where they were not kept."""
    reference_kl: float = 0.0
    """KL to the model before training, for `algorithm.kl_reward`."""


class Batch(BaseModel):
    """The samples of one step: group → index → sample. Counts them by status as they change, so that no question below
    looks at every sample."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    step: int
    groups: dict[int, dict[int, SampleState]]
    refills: dict[int, int] = {}
    ready: bool = False
    """Its TrainStep request is stored."""
    num_chosen: int | None = None
    """Samples in that request; none: all that have a score."""
    accepted: bool = False
    """Its user resumed the job after a pause for its drops: it is trained on what is left."""
    figures: dict[str, float] = {}
    spread: dict[str, dict[str, Any]] = {}
    """Metrics and histograms of its rewards and advantages, as of that request."""
    opened_at: float
    sampled_at: float | None = None
    scored_at: float | None = None
    ready_at: float | None = None
    _tally: Counter[str] = PrivateAttr(default_factory=Counter)
    _tallies: dict[int, Counter[str]] = PrivateAttr(default_factory=dict)
    """Tallies by group."""
    _wanting: dict[int, None] = PrivateAttr(default_factory=dict)
    _scoring: dict[int, None] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any) -> None:
        for group, samples in self.groups.items():
            self._tallies[group] = Counter(sample.status for sample in samples.values())
            self._tally.update(self._tallies[group])
            self._place(group)

    @classmethod
    def opened(cls, step: int, num_groups: int, group_size: int, at: float) -> Batch:
        """Opens the batch of a step; all samples are wanted."""
        groups = {group: {index: SampleState() for index in range(group_size)} for group in range(num_groups)}
        return cls(step=step, opened_at=at, groups=groups)

    def add_sample(self, group: int) -> None:
        """Wants another one of a group, with the next index."""
        self.refills[group] = self.refills.get(group, 0) + 1
        self.groups[group][max(self.groups[group]) + 1] = SampleState()
        self._count(group, {"wanted": 1})

    def move(self, group: int, sample: SampleState, status: SampleStatus) -> None:
        """Changes the status of one of the group's samples."""
        self._count(group, {sample.status: -1, status: 1})
        sample.status = status

    @property
    def wanting(self) -> Collection[int]:
        """Groups that want samples; those that want some again come last."""
        return self._wanting.keys()

    @property
    def scoring(self) -> Collection[int]:
        """Complete groups with samples that have no score, in the order in which they were complete."""
        return self._scoring.keys()

    def has(self, status: SampleStatus) -> bool:
        return self._tally[status] > 0

    def count(self, status: SampleStatus) -> int:
        return self._tally[status]

    @property
    def is_judged(self) -> bool:
        """True if rewards have scored or refused one of its samples. One that was never sampled does not count."""
        return self.has("scored") or any(
            sample.status == "dropped" and sample.version is not None
            for samples in self.groups.values()
            for sample in samples.values()
        )

    def most_dropped(self) -> tuple[str, int, int]:
        """The reward that gave the most samples no score, how many, and of how many that were made."""
        made = [one for group in self.groups.values() for one in group.values() if one.version is not None]
        named = Counter(filter(None, (DropReason.NO_SCORE.name_in(one.reason) for one in made)))
        [(reward, number)] = named.most_common(1) or [("", 0)]
        return reward, number, len(made)

    def score_again(self) -> Counter[str]:
        """Wants new scores of all samples that rewards have judged; returns by reason those that were dropped."""
        reasons = Counter[str]()
        for group, samples in self.groups.items():
            for sample in samples.values():
                if sample.status == "scored" or (sample.status == "dropped" and is_verdict(sample.reason)):
                    reasons.update([sample.reason] if sample.reason else [])
                    sample.score, sample.scores, sample.reason = None, _NO_SCORES, ""
                    self.move(group, sample, "sampled")
        self.accepted = False
        return reasons

    @property
    def num_trained(self) -> int:
        """Samples that the step trains on, or will."""
        return self.count("scored") if self.num_chosen is None else self.num_chosen

    @property
    def num_left_out(self) -> int:
        """Samples that have a score and are not trained on: in no pair, or not among the best and worst of a group."""
        return self.count("scored") - self.num_trained

    def scored(self) -> list[Scored]:
        """Returns the scored samples, ascending by (group, index)."""
        return [
            Scored(group, index, sample.score, sample.scores, sample.reference_kl)
            for group, samples in sorted(self.groups.items())
            for index, sample in sorted(samples.items())
            if sample.status == "scored" and sample.score is not None
        ]

    @property
    def phase(self) -> Phase:
        if self.ready:
            return Phase.TRAIN
        if self.has("wanted"):
            return Phase.ROLLOUT
        return Phase.SCORE if self.has("sampled") else Phase.ADVANTAGE

    def _count(self, group: int, changes: Mapping[str, int]) -> None:
        for tally in (self._tally, self._tallies[group]):
            for status, number in changes.items():
                tally[status] += number
        self._place(group)

    def _place(self, group: int) -> None:
        tally = self._tallies[group]
        for groups, belongs in (
            (self._wanting, tally["wanted"] > 0),
            (self._scoring, tally["sampled"] > 0 and not tally["wanted"]),
        ):
            if belongs:
                groups[group] = None
            else:
                groups.pop(group, None)


def with_dropped(dropped: dict[str, int], reason: str, number: int) -> dict[str, int]:
    """Reason → number, `number` more of a reason."""
    return {**dropped, reason: dropped.get(reason, 0) + number} if number else dropped
