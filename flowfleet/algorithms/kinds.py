"""Kinds of losses: what those of a kind train on, what they need of samples, and which objective computes them.

A new kind is one `register_kind` next to its losses, and an objective of the trainer. Everything else asks the fields
below, never a kind by its name. Free of torch, for the controller.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from flowfleet.algorithms.settings import LossSettings


@dataclass(frozen=True, slots=True)
class Kind:
    """Properties that the losses of a kind share."""

    name: str
    settings: type[LossSettings]
    """Settings that each of them reads; the base of their models."""
    objective: str
    """"module:class" of an `Objective` of services/trainer/step/objectives/base.py, made of `StepInputs`."""
    samples: Literal["steps", "final", "tokens"]
    """Record that a sample keeps. steps: its noisy steps. final: its final latents. tokens: the text, for models that
    write one."""
    has_ratio: bool = False
    """They have a ratio to the policy that sampled, so that a sampler of other numerics (float8, a merged adapter,
    another engine) needs a correction. All others take samples of any sampler as they are."""
    reads_rewards: bool = True
    """A sample counts by its rewards. A teacher needs none."""
    follows_gradients: bool = False
    """They follow the gradient of a reward: the trainer asks for it."""

    def load(self) -> Callable[..., Any]:
        """Imports the objective; needs torch."""
        return imported(self.objective)

    @property
    def writes_tokens(self) -> bool:
        """True where they train models that write text; else flows."""
        return self.samples == "tokens"

    @property
    def has_step_ratio(self) -> bool:
        """True where they have a ratio of noisy steps, which the trainer recomputes."""
        return self.has_ratio and self.samples == "steps"

    @property
    def takes_any_sampler(self) -> bool:
        """True where samples of any sampler, and their rewards alone, are enough."""
        return self.samples == "final" and not self.follows_gradients


def imported(path: str) -> Callable[..., Any]:
    """Imports the object that "module:function" names."""
    module, name = path.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


KINDS: dict[str, Kind] = {}
OBJECTIVES = "services.trainer.step.objectives"
"""The package of Flowfleet's own objectives."""


def register_kind(kind: Kind) -> None:
    """Raises ValueError for a name that is taken."""
    add(kind, KINDS, "a kind of losses")


def add(entry: Any, known: dict[str, Any], what: str) -> None:
    """Registers an entry under its name. Raises ValueError for one that is taken."""
    if entry.name in known:
        raise ValueError(f"{what} named {entry.name} is registered already")
    known[entry.name] = entry
