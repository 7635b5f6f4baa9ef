"""The update of one step: for each update forwards, losses, backwards and optimizer.

A row is one (sample, round) pair of the objective: a noisy step, or a noise level. An update's loss is the mean over
its rows on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowfleet import devices
from flowfleet.telemetry import Timings
from services.trainer.batches import Update
from services.trainer.engine import Engine
from services.trainer.inputs import Batch
from services.trainer.objectives.base import Objective
from services.trainer.objectives.matching import MatchingObjective
from services.trainer.objectives.policy import PolicyObjective
from services.trainer.totals import Totals


class StepTrainer:
    """Trains on one step's samples."""

    def __init__(self, engine: Engine, step: int, num_samples: int, sde_steps: Sequence[int] = ()) -> None:
        """`num_samples`: of the whole step, over all ranks. `sde_steps`: where noise entered, for policy losses."""
        self._engine = engine
        self._step = step
        self._totals = Totals(engine.ranks, len(sde_steps), num_samples)
        self._objective: Objective = (
            PolicyObjective(engine, sde_steps, self._totals)
            if engine.spec.records_steps
            else MatchingObjective(engine, step, self._totals)
        )

    @property
    def num_rounds(self) -> int:
        """Rows of a sample."""
        return self._objective.num_rounds

    def train(
        self, updates: Sequence[Update], batches: Sequence[Sequence[Batch]], timings: Timings
    ) -> dict[str, float]:
        """Collective. Runs all updates; metrics are equal on every rank. `batches[u]`: this rank's of update u."""
        self._objective.prepare(batches, timings)
        with timings("update_actor"):
            for number, update in enumerate(updates):
                self._update(number, update)
            decay = self._engine.policies.follow(self._step)
        metrics = self._totals.metrics(len(updates))
        return metrics if decay is None else metrics | {"training/old_policy_decay": decay}

    def _update(self, number: int, update: Update) -> None:
        weight = 1 / (update.num_samples * self._objective.num_rounds)
        forwards = self._objective.forwards(number)
        last = {forward.component: place for place, forward in enumerate(forwards)}
        for place, forward in enumerate(forwards):
            self._engine.set_last_backward(forward.component, place == last[forward.component])
            losses = forward.losses()
            loss = losses.sum() * (0.0 if forward.batch.is_padding else weight)
            torch.autograd.backward(loss * self._engine.ranks.world_size)  # FSDP averages over the ranks
            self._totals.add_loss(forward.batch, loss.detach())
        outcome = self._engine.optimizer.step()
        if outcome.applied:
            self._engine.policies.updated()
        self._totals.add_outcome(outcome)
        devices.synchronize(self._engine.ranks.device)
