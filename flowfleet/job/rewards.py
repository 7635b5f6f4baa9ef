"""Rewards of a job's samples: `[rewards.NAME]`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from flowfleet.job.part import Curve, Factor, Part

REWARD_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
"""A part of names of metrics, of reasons and of settings: without dots and slashes, which divide those."""


def _as_text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, bool | int | float) else value


Parameter = Annotated[str, BeforeValidator(_as_text)]
"""A parameter of a reward, as text."""


class GatePart(Part):
    """A guard: what becomes of a sample whose raw score is on the wrong side. Give `below` or `above`."""

    below: float | None = None
    """It acts on scores below this."""
    above: float | None = None
    """It acts on scores above this."""
    action: Literal["zero", "mask"] = "zero"
    """zero: the sample's total is 0, whatever its other rewards say. mask: the sample is not trained on; it is counted
    as `gated_NAME` and no other is asked for in its place."""

    @model_validator(mode="after")
    def _one_side(self) -> GatePart:
        if (self.below is None) == (self.above is None):
            raise ValueError("a gate needs one limit: give it either `below` or `above`")
        return self

    def shut(self, score: float) -> bool:
        """Returns whether it acts on a sample of this raw score."""
        return score < self.below if self.below is not None else self.above is not None and score > self.above


class RewardPart(Part):
    service: str | None = Field(default=None, min_length=1)
    """Name of the reward service; unset: the reward's own name. Several rewards may ask one service."""
    weight: Factor = 1.0
    """Weight of the score in the sum. 0 only watches, or guards with `gate`."""
    params: dict[str, Parameter] = Field(default={})
    """Handed to the scorer with each request. Numbers and booleans go as text: `0.5`, `true`."""
    clip: tuple[float, float] | None = None
    """[low, high] that the raw score is cut to before it is weighted."""
    curve: Curve = ()
    """[[step, factor], …], steps ascending: factors of the weight, linear in between, constant before and after."""
    gate: GatePart | None = None
    """Gate on the raw score."""
    held_out_only: bool = False
    """Score held-out samples alone; a step does not wait for it. Needs a weight of 0 and no gate."""
    on_failure: Literal["pause", "drop", "skip"] = "pause"
    """When the service has failed for `timeouts.rewards_s`, or its scores were pending for `timeouts.pending_s`: pause
    the job, drop the samples (`no_score_NAME`), or continue with the other rewards, which is recorded and counted."""

    @field_validator("clip")
    @classmethod
    def _ascending_clip(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and clip[0] >= clip[1]:
            raise ValueError(
                f"[{clip[0]:g}, {clip[1]:g}] leaves nothing: give the lower limit first, then a higher one"
            )
        return clip

    @property
    def has_influence(self) -> bool:
        """True where its weight is other than 0 at some step."""
        return self.weight != 0 and (not self.curve or any(factor for _, factor in self.curve))

    def service_of(self, name: str) -> str:
        """The service that the reward of this name asks."""
        return self.service or name
