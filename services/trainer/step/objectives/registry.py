"""The objective of each kind of loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from flowfleet.algorithms.registry import LossKind
from services.trainer.model.engine import Engine
from services.trainer.step.objectives.base import Objective
from services.trainer.step.objectives.distillation import DistillationObjective
from services.trainer.step.objectives.matching import MatchingObjective
from services.trainer.step.objectives.policy import PolicyObjective
from services.trainer.step.objectives.sequence import SequenceObjective
from services.trainer.step.totals import Totals

_KINDS: Mapping[LossKind, Callable[[Engine, int, Sequence[int], Totals], Objective]] = {
    "policy": lambda engine, step, sde_steps, totals: PolicyObjective(engine, sde_steps, totals),
    "matching": lambda engine, step, sde_steps, totals: MatchingObjective(engine, step, totals),
    "distillation": lambda engine, step, sde_steps, totals: DistillationObjective(engine, sde_steps, totals),
    "sequence": lambda engine, step, sde_steps, totals: SequenceObjective(engine, totals),
}


def objective_of(engine: Engine, step: int, sde_steps: Sequence[int], totals: Totals) -> Objective:
    """Objective of the job's loss for one training step; `sde_steps` as in `StepTrainer`."""
    return _KINDS[engine.spec.loss.kind](engine, step, sde_steps, totals)
