"""The objective of each kind of loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from flowfleet.algorithms.registry import LossKind
from services.trainer.model.engine import Engine
from services.trainer.step.gradients.gradients import RewardGradients
from services.trainer.step.objectives.base import Objective
from services.trainer.step.objectives.distillation import DistillationObjective
from services.trainer.step.objectives.gradient import GradientObjective
from services.trainer.step.objectives.matching import MatchingObjective
from services.trainer.step.objectives.policy import PolicyObjective
from services.trainer.step.objectives.sequence import SequenceObjective
from services.trainer.step.totals import Totals

_Make = Callable[[Engine, int, Sequence[int], Totals, RewardGradients | None], Objective]

_KINDS: Mapping[LossKind, _Make] = {
    "policy": lambda engine, step, sde_steps, totals, rewards: PolicyObjective(engine, sde_steps, totals),
    "matching": lambda engine, step, sde_steps, totals, rewards: MatchingObjective(engine, step, totals),
    "distillation": lambda engine, step, sde_steps, totals, rewards: DistillationObjective(engine, sde_steps, totals),
    "sequence": lambda engine, step, sde_steps, totals, rewards: SequenceObjective(engine, totals),
    "gradient": lambda engine, step, sde_steps, totals, rewards: GradientObjective(
        engine, step, sde_steps, totals, cast(RewardGradients, rewards)
    ),
}


def objective_of(
    engine: Engine, step: int, sde_steps: Sequence[int], totals: Totals, rewards: RewardGradients | None
) -> Objective:
    """Objective of the job's loss for one training step; `sde_steps` and `rewards` as in `StepTrainer`."""
    return _KINDS[engine.spec.loss.kind](engine, step, sde_steps, totals, rewards)
