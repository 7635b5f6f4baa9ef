"""The objective of each kind of loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from flowfleet.algorithms.kinds import Kind
from services.trainer.step.objectives.base import Objective, StepInputs


def objective_of(inputs: StepInputs) -> Objective:
    """Objective of the job's loss for one training step."""
    return _class(inputs.engine.spec.loss.traits)(inputs)


def _class(kind: Kind) -> Callable[[StepInputs], Objective]:
    module, name = kind.objective.split(":")
    found: Callable[[StepInputs], Objective] = getattr(importlib.import_module(module), name)
    return found
