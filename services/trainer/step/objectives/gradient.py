"""The objective of losses that train on gradients of rewards: on images that one velocity predicts.

Rewards are asked before the update (`prepare`), about images of the policy as it is. That costs a forward without
gradient. In return a reward that fails leaves everything as it was, and no activation is kept while rewards are waited
for. In the update a row's loss has minus the reward as its value, and its gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from flowfleet.algorithms.builtin.followed import SrpoSettings
from flowfleet.algorithms.matching.losses import mean_square, noisy
from flowfleet.algorithms.reward_gradient import GradientOutput, GradientRows, aligned
from flowfleet.algorithms.settings import NoiseLevelSettings
from flowfleet.hardware import devices
from flowfleet.process.telemetry import Timings
from services.trainer.model.policies import needs_reference
from services.trainer.step.gradients.gradients import BatchGradient
from services.trainer.step.inputs import Batch, FinalBatch, FlowBatch, StepsBatch
from services.trainer.step.objectives.base import Forward, StepInputs, velocity
from services.trainer.step.objectives.draws import draws_of


@dataclass
class _Item:
    """A micro-batch with what rewards and the reference say of each of its rounds."""

    batch: FlowBatch
    gradients: list[BatchGradient] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)
    """(B, *latent) float32"""


@dataclass(frozen=True)
class _Start:
    """Where the velocity of a round is taken."""

    latents: Tensor
    sigma: Tensor
    """(B,) on the CPU, where an expert is chosen by it."""
    noise: Tensor | None
    after: Tensor | None = None
    """(B,) where the loss's step ends, of losses that have one."""


class GradientObjective:
    """See `Objective`. A round is a step that samples were stored at, or a noise level of each sample."""

    def __init__(self, inputs: StepInputs) -> None:
        engine, spec = inputs.engine, inputs.engine.spec
        assert inputs.rewards is not None
        self._engine, self._step, self._totals, self._rewards = engine, inputs.step, inputs.totals, inputs.rewards
        self._part, self._loss = spec.algorithm, spec.loss.load()
        self._steps = list(inputs.sde_steps)
        self._draws = draws_of(spec, engine.adapter, inputs.step)
        self._items: list[list[_Item]] = []
        inputs.totals.num_steps = 0

    @property
    def num_rounds(self) -> int:
        if self._engine.spec.loss.from_steps:
            return len(self._steps)
        return self._part.of(NoiseLevelSettings).num_noise_levels

    def prepare(self, batches: Sequence[Sequence[Batch]], timings: Timings) -> None:
        """See `Objective`. Raises an error of the project where a reward gives no gradient: nothing has changed."""
        self._items = [[_Item(cast(FlowBatch, batch)) for batch in part] for part in batches]
        items = [item for part in self._items for item in part]
        with timings("reward_gradient"), torch.no_grad():
            try:
                for item in items:
                    item.gradients = [self._gradient(item, k) for k in range(self.num_rounds)]
                self._rewards.settle()
            finally:
                self._engine.reshard()
            devices.synchronize(self._engine.ranks.device)
        if needs_reference(self._engine.spec):
            with timings("ref"), torch.no_grad(), self._engine.policy("reference"):
                for item in items:
                    starts = [self._start(item.batch, k) for k in range(self.num_rounds)]
                    item.references = [self._velocity(item.batch, start) for start in starts]
                devices.synchronize(self._engine.ranks.device)

    def forwards(self, update: int) -> list[Forward]:
        return [
            Forward(item.batch, self._component(item.batch, k), partial(self._losses, item, k))
            for item in self._items[update]
            for k in range(self.num_rounds)
        ]

    def _gradient(self, item: _Item, k: int) -> BatchGradient:
        """Collective."""
        output = self._predicted(item.batch, self._start(item.batch, k))[0]
        image = output.image
        gradient = BatchGradient(torch.zeros_like(image), *(image.new_zeros(len(image)) for _ in range(2)))
        with self._engine.ranks.together():
            if not item.batch.is_padding:
                gradient = self._rewards.of(item.batch.rows, k, image, output.wishes)
        return gradient

    def _losses(self, item: _Item, k: int) -> Tensor:
        """(B,) with gradient."""
        start, known = self._start(item.batch, k), item.gradients[k]
        output, predicted = self._predicted(item.batch, start)
        along = (known.gradient * output.image).flatten(1).sum(dim=1)
        loss: Tensor = along.detach() - along - known.rewards  # minus the reward, with its gradient
        sums = {
            "actor/gradient_reward": known.rewards.sum(),
            "actor/reward_gradient_norm": known.gradient.flatten(1).norm(dim=1).sum(),
            "actor/without_gradient": known.missing.sum(),
        }
        if item.references:
            distance = mean_square(predicted - item.references[k])
            sums["actor/kl_loss"] = distance.detach().sum()
            loss = loss + self._engine.spec.kl.kl_coef * item.batch.ties * distance
        self._totals.add_sums(item.batch, sums)
        return loss

    def _predicted(self, batch: FlowBatch, start: _Start) -> tuple[GradientOutput, Tensor]:
        """The loss's image and wishes, and the velocity that they come from."""
        predicted = self._velocity(batch, start)
        device = start.latents.device
        after = None if start.after is None else start.after.to(device)
        rows = GradientRows(start.latents, start.sigma.to(device), predicted, start.noise, after)
        return self._loss(rows, self._part, self._step), predicted

    def _velocity(self, batch: FlowBatch, start: _Start) -> Tensor:
        return velocity(self._engine, start.latents, 1000 * start.sigma, batch)

    def _start(self, batch: FlowBatch, k: int) -> _Start:
        if isinstance(batch, StepsBatch):
            sigma = self._engine.schedule.sigmas[self._steps[k]].expand(len(batch.rows))
            return _Start(batch.latents[k], sigma, None)
        final = cast(FinalBatch, batch)
        noise = self._draws.noise(final.places, k, final.clean.shape[1:]).to(final.clean.device)
        sigma, after = self._draws.sigmas(final.places, 0, k), None
        if isinstance(self._part, SrpoSettings):
            sigma, after = aligned(sigma, self._part.align_step, self._draws.interval(0, k)[1])
        return _Start(noisy(final.clean, noise, sigma.to(final.clean.device)), sigma, noise, after)

    def _component(self, batch: FlowBatch, k: int) -> str:
        if isinstance(batch, StepsBatch):
            return self._engine.component(self._engine.schedule.timesteps[self._steps[k]])
        return self._engine.component(torch.tensor([1000 * level for level in self._draws.interval(0, k)]))
