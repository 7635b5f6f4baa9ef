"""Commands of the state machine: what should be running. A frozen dataclass each, so that a set can hold them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EnsureTrainer:
    """Find or start the job's trainer and configure it."""


@dataclass(frozen=True)
class Generate:
    """Sample what these groups still want, as one request to one replica."""

    step: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """Score the samples of a complete group that have no score."""

    step: int
    group: int


@dataclass(frozen=True)
class ComputeAdvantages:
    step: int


@dataclass(frozen=True)
class TrainStep:
    step: int


@dataclass(frozen=True)
class Publish:
    version: int
    evaluated: bool = False
    """Publishes the evaluated (averaged) weights; else those that sample."""


@dataclass(frozen=True)
class Checkpoint:
    version: int


@dataclass(frozen=True)
class Validate:
    version: int


@dataclass(frozen=True)
class Export:
    """Write the trained model."""


Command = EnsureTrainer | Generate | Score | ComputeAdvantages | TrainStep | Publish | Checkpoint | Validate | Export
