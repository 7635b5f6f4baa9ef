"""The objective of matching losses: on velocities at new noise over the final latents, at some noise levels a sample.

Old and reference velocities come first, in one pass through all micro-batches for each policy: so the weights are
switched once a policy, and every rank gathers in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from flowfleet.algorithms.matching.losses import MatchingRows, noisy
from flowfleet.algorithms.parts import scaled
from flowfleet.algorithms.settings import NoiseLevelSettings
from flowfleet.hardware import devices
from flowfleet.process.telemetry import Timings
from services.trainer.model.policies import Policy, needs_reference
from services.trainer.step.inputs import Batch, FinalBatch
from services.trainer.step.objectives.base import Forward, StepInputs, latent_parts, velocity
from services.trainer.step.objectives.draws import draws_of


@dataclass
class _Item:
    """A micro-batch with what other policies say of it."""

    batch: FinalBatch
    update: int
    velocities: dict[Policy, list[Tensor]] = field(default_factory=dict)
    """(B, *latent) float32 for each round."""


class MatchingObjective:
    """See `Objective`. A round is a noise level of each sample."""

    def __init__(self, inputs: StepInputs) -> None:
        spec = inputs.engine.spec
        self._engine, self._part, self._totals = inputs.engine, spec.algorithm, inputs.totals
        self._loss = spec.loss.load()
        self._draws = draws_of(spec, inputs.engine.adapter, inputs.step)
        self._items: list[list[_Item]] = []
        self._num_passes = 0

    @property
    def num_rounds(self) -> int:
        return self._part.of(NoiseLevelSettings).num_noise_levels

    def prepare(self, batches: Sequence[Sequence[Batch]], timings: Timings) -> None:
        """See `Objective`: velocities of the reference and of the old policy, where the loss reads them. A pass has new
        noise: its rounds are numbered on."""
        self._num_passes += 1
        self._items = [
            [_Item(cast(FinalBatch, batch), number) for batch in part] for number, part in enumerate(batches)
        ]
        if needs_reference(self._engine.spec):
            with timings("ref"):
                self._add_velocities("reference")
        if self._engine.spec.loss.keeps_old_policy:
            with timings("old_policy"):
                self._add_velocities("old")

    def forwards(self, update: int) -> list[Forward]:
        intervals = [self._draws.interval(update, self._drawn_round(k)) for k in range(self.num_rounds)]
        components = [
            self._engine.component(torch.tensor([1000 * level for level in interval])) for interval in intervals
        ]
        return [
            Forward(item.batch, component, partial(self._losses, item, k))
            for item in self._items[update]
            for k, component in enumerate(components)
        ]

    @torch.no_grad()
    def _add_velocities(self, policy: Policy) -> None:
        with self._engine.policy(policy):
            for item in (item for part in self._items for item in part):
                rounds = [self._drawn(item, k) for k in range(self.num_rounds)]
                item.velocities[policy] = [self._velocity(item, noise, sigma) for noise, sigma in rounds]
        devices.synchronize(self._engine.ranks.device)

    def _losses(self, item: _Item, k: int) -> Tensor:
        """(B,) with gradient."""
        noise, sigma = self._drawn(item, k)
        old, reference = item.velocities.get("old"), item.velocities.get("reference")
        rows = MatchingRows(
            clean=self._scaled(item, item.batch.clean),
            noise=self._scaled(item, noise),
            sigma=sigma.to(item.batch.clean.device),
            velocity=self._scaled(item, self._velocity(item, noise, sigma)),
            advantages=item.batch.advantages,
            old_velocity=None if old is None else self._scaled(item, old[k]),
            reference_velocity=None if reference is None else self._scaled(item, reference[k]),
            ties=item.batch.ties,
            groups=torch.tensor([group for group, _ in item.batch.places], device=item.batch.clean.device),
        )
        output = self._loss(rows, self._part)
        self._totals.add_sums(item.batch, output.sums)
        if output.ratios is not None:
            self._totals.add_ratios(item.batch, output.ratios)
        loss: Tensor = output.loss
        return loss

    def _scaled(self, item: _Item, values: Tensor) -> Tensor:
        """Latents, noise or velocities as losses square their differences."""
        return scaled(values, latent_parts(self._engine, item.batch))

    def _drawn(self, item: _Item, k: int) -> tuple[Tensor, Tensor]:
        """Noise (B, *latent) of round k on the device, and its sigmas (B,) on the CPU, where an expert is chosen by
        them. Drawn again each time, which costs less than keeping them."""
        clean, places, k = item.batch.clean, item.batch.places, self._drawn_round(k)
        noise = self._draws.noise(places, k, clean.shape[1:])
        return noise.to(clean.device), self._draws.sigmas(places, item.update, k)

    def _drawn_round(self, k: int) -> int:
        """The number under which round k of this pass is drawn."""
        return (self._num_passes - 1) * self.num_rounds + k

    def _velocity(self, item: _Item, noise: Tensor, sigma: Tensor) -> Tensor:
        clean = item.batch.clean
        return velocity(self._engine, noisy(clean, noise, sigma.to(clean.device)), 1000 * sigma, item.batch)
