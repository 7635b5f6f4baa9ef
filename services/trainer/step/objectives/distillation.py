"""The objective of distillation losses: on the noisy steps that the rollout stored, next to those of a teacher.

A teacher is another adapter on the same base. Its means come first, in one pass through the micro-batches that hold
samples of its own: so the weights are switched once a teacher. Which micro-batches these are is agreed on by all ranks,
since a forward of a sharded model is collective.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from flowfleet.algorithms.distillation import DistillationRows
from flowfleet.algorithms.parts import scaled
from flowfleet.hardware import devices
from flowfleet.process.telemetry import Timings
from services.trainer.model.policies import Teacher
from services.trainer.step.inputs import Batch, StepsBatch
from services.trainer.step.objectives.base import Forward, StepInputs, latent_parts, stored_step


class DistillationObjective:
    """See `Objective`. A round is a noisy step."""

    def __init__(self, inputs: StepInputs) -> None:
        spec = inputs.engine.spec
        self._engine, self._totals = inputs.engine, inputs.totals
        self._steps = list(inputs.sde_steps)
        self._part, self._loss = spec.algorithm, spec.loss.load()
        self._teachers = list(spec.teachers)
        self._batches: list[list[StepsBatch]] = []
        self._means: dict[int, Tensor] = {}
        """(W, *latent) of a sample's teacher, by its row."""

    @property
    def num_rounds(self) -> int:
        return len(self._steps)

    def prepare(self, batches: Sequence[Sequence[Batch]], timings: Timings) -> None:
        """See `Objective`: the teachers' means. A rank's samples are the same in every pass, so that all is known after
        the first."""
        self._batches = [[cast(StepsBatch, batch) for batch in part] for part in batches]
        if self._means:
            return
        every = [batch for part in self._batches for batch in part]
        holds = torch.tensor([[float(name in batch.teachers) for name in self._teachers] for batch in every])
        wanted = self._engine.ranks.max(holds.to(self._engine.ranks.device)) > 0
        with timings("teacher"):
            for number, name in enumerate(self._teachers):
                self._add_means(
                    name, [batch for batch, is_wanted in zip(every, wanted[:, number], strict=True) if is_wanted]
                )

    def forwards(self, update: int) -> list[Forward]:
        timesteps = self._engine.schedule.timesteps
        components = [self._engine.component(timesteps[step]) for step in self._steps]
        return [
            Forward(batch, component, partial(self._losses, batch, k))
            for batch in self._batches[update]
            for k, component in enumerate(components)
        ]

    @torch.no_grad()
    def _add_means(self, teacher: str, batches: Sequence[StepsBatch]) -> None:
        with self._engine.policy(Teacher(teacher)):
            for batch in batches:
                steps = [stored_step(self._engine, batch, k, step) for k, step in enumerate(self._steps)]
                means = torch.stack([step.mean for step in steps])
                rows = zip(batch.rows, batch.teachers, means.unbind(1), strict=True)
                self._means |= {row: mean for row, name, mean in rows if name == teacher}
        devices.synchronize(self._engine.ranks.device)

    def _losses(self, batch: StepsBatch, k: int) -> Tensor:
        """(B,) with gradient."""
        result = stored_step(self._engine, batch, k, self._steps[k])
        teacher_mean = torch.stack([self._means[row][k] for row in batch.rows])
        parts = latent_parts(self._engine, batch)
        rows = DistillationRows(scaled(result.mean, parts), scaled(teacher_mean, parts), result.std)
        output = self._loss(rows, self._part)
        self._totals.add_sums(batch, output.sums)
        loss: Tensor = output.loss
        return loss
