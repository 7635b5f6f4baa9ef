"""The updates of one step: passes through its samples, and for each update forwards, losses, backwards and optimizer.

A row is one (sample, round) pair of the objective: a noisy step, or a noise level. An update's loss is the mean over
its rows on all ranks.
"""

from collections.abc import Iterable, Sequence

import torch

from flowfleet.hardware import devices
from flowfleet.process.telemetry import Timings
from services.trainer.model.engine import Engine
from services.trainer.step.batches import Update
from services.trainer.step.gradients.gradients import RewardGradients
from services.trainer.step.inputs import Batch
from services.trainer.step.learning_rate import learning_rate
from services.trainer.step.objectives.base import Objective, StepInputs
from services.trainer.step.totals import Totals

Pass = tuple[Sequence[Update], Sequence[Sequence[Batch]]]
"""Its updates, and this rank's micro-batches of each."""


class StepTrainer:
    """Trains on one step's samples."""

    def __init__(
        self,
        engine: Engine,
        step: int,
        num_samples: int,
        sde_steps: Sequence[int] = (),
        rewards: RewardGradients | None = None,
    ) -> None:
        """`num_samples`: of the whole step, over all ranks. `sde_steps`: where noise entered, for policy losses, or
        where samples were stored. `rewards`: for losses that train on their gradients."""
        self._engine = engine
        self._step = step
        counts = engine.mesh.counts(engine.ranks.rank)
        self._totals = Totals(engine.ranks, len(sde_steps), num_samples, counts=counts)
        self._num_updates = 0
        inputs = StepInputs(engine, step, sde_steps, self._totals, rewards)
        self._objective: Objective = engine.spec.loss.traits.load()(inputs)

    @property
    def num_rounds(self) -> int:
        """Rows of a sample."""
        return self._objective.num_rounds

    def sample_ratios(self) -> list[float]:
        """Collective. After `train`: by sample how far the policy moved while it was trained on (totals.py)."""
        return self._totals.sample_ratios()

    def train(self, passes: Iterable[Pass], timings: Timings) -> dict[str, float]:
        """Collective. Runs all updates; metrics are equal on every rank."""
        for updates, batches in passes:
            self._objective.prepare(batches, timings)
            with timings("update_actor"):
                for number, update in enumerate(updates):
                    self._update(number, update)
        with timings("update_actor"):
            decay = self._engine.policies.follow()
        metrics = self._totals.metrics()
        self._engine.policies.move_reference(self._step, metrics["actor/kl_loss"])
        return metrics if decay is None else metrics | {"training/old_policy_decay": decay}

    def _update(self, number: int, update: Update) -> None:
        num_rows = update.num_samples * self._objective.num_rounds
        scale = self._engine.loss_scale.before(num_rows)
        weight = 1 / num_rows
        forwards = self._objective.forwards(number)
        last = {forward.component: index for index, forward in enumerate(forwards)}
        for index, forward in enumerate(forwards):
            with self._engine.backward(forward.component, is_last=index == last[forward.component]):
                losses = forward.losses()
                loss = losses.sum() * (0.0 if forward.batch.is_padding else weight)
                torch.autograd.backward(loss * (scale * self._engine.ranks.world_size))  # the ranks' mean is taken
            self._totals.add_loss(forward.batch, loss.detach())
            del losses, loss  # and so their graph, before the next forward
            self._engine.ranks.beats.beat()
        outcome = self._engine.optimizer.step(learning_rate(self._engine.spec, self._step, self._num_updates), scale)
        self._engine.loss_scale.after(is_finite=outcome.applied)
        if outcome.applied:
            self._engine.policies.updated()
        self._totals.add_outcome(outcome)
        self._num_updates += 1
        devices.synchronize(self._engine.ranks.device)
        self._engine.ranks.beats.beat()
