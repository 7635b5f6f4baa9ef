"""Profiles of training steps and of the sampling for them, as REST gives them. Free of torch."""

from typing import Literal

from flowfleet.api.answers import Answer


class Cost(Answer):
    name: str
    """Operator, or kernel of an accelerator."""
    calls: int
    seconds: float
    """Own time, without what it called."""


class Profile(Answer):
    step: int
    of: Literal["trainer", "rollout"] = "trainer"
    """Its updates, or the first batch that a rollout sampled for it."""
    on_device: bool = False
    """True if the costs are an accelerator's kernels."""
    costs: list[Cost] = []
    """The largest, of rank 0, in order."""
    files: list[str] = []
    """Traces and memory snapshots of all ranks."""
