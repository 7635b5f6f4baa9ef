"""The objective of policy losses: on the log-probs of the noisy steps that the rollout stored.

Every forward is the rollout's own: the adapter's `velocity` on the stored latents, then the reverse step evaluated at
the stored next latents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from flowfleet import devices
from flowfleet.algorithms.correction import Correction, correct
from flowfleet.algorithms.losses import PolicyRows, limits, reference_kl
from flowfleet.algorithms.sde import StepResult, reverse_step
from flowfleet.telemetry import Timings
from services.trainer.engine import Engine
from services.trainer.inputs import Batch, StepsBatch
from services.trainer.objectives.base import Forward, velocity
from services.trainer.policies import needs_reference
from services.trainer.totals import Totals


@dataclass
class _Item:
    """A micro-batch with what was computed before the step's first optimizer update."""

    batch: StepsBatch
    update: int
    old_log_probs: Tensor | None = None
    """(W, B); None where the update's own forward gives them."""
    old_means: Tensor | None = None
    """(W, B, *latent), for losses that read them; None as above."""
    reference_means: Tensor | None = None
    """(W, B, *latent), with KL only."""


class PolicyObjective:
    """See `Objective`. A round is a noisy step."""

    def __init__(self, engine: Engine, sde_steps: Sequence[int], totals: Totals) -> None:
        """`sde_steps`: the denoising steps at which noise entered."""
        spec = engine.spec
        self._engine, self._totals = engine, totals
        self._steps = list(sde_steps)
        self._part, self._noise = spec.algorithm, spec.rollout.noise
        self._kind, self._loss = spec.loss, spec.loss.load()
        self._schedule = engine.adapter.schedule(spec.rollout.num_inference_steps, spec.rollout.size)
        self._num_elements = math.prod(engine.adapter.latent_shape(spec.rollout.size))
        self._limits = limits(spec.algorithm, self._num_elements)
        totals.clip_range = self._limits.clip_range if "clip_range" in spec.loss.reads else None
        self._items: list[list[_Item]] = []

    @property
    def num_rounds(self) -> int:
        return len(self._steps)

    def prepare(self, batches: Sequence[Sequence[Batch]], timings: Timings) -> None:
        """See `Objective`: reference means, and old log-probs where an update's first forward does not give them."""
        self._items = [
            [_Item(cast(StepsBatch, batch), number) for batch in part] for number, part in enumerate(batches)
        ]
        items = [item for part in self._items for item in part]
        if needs_reference(self._engine.spec):
            with timings("ref"):
                self._add_references(items)
        if late := [item for item in items if self._needs_pass(item)]:
            with timings("old_log_prob"):
                self._add_old(late)

    def forwards(self, update: int) -> list[Forward]:
        timesteps = self._schedule.timesteps
        components = [self._engine.component(timesteps[step]) for step in self._steps]
        return [
            Forward(item.batch, component, partial(self._losses, item, k))
            for item in self._items[update]
            for k, component in enumerate(components)
        ]

    def _needs_pass(self, item: _Item) -> bool:
        """An update's first forward is the old policy's only until the optimizer has moved the weights."""
        mode = self._part.old_log_probs
        return mode == "recompute" or (mode == "first_forward" and item.update > 0)

    @torch.no_grad()
    def _add_references(self, items: Sequence[_Item]) -> None:
        with self._engine.policy("reference"):
            for item in items:
                item.reference_means = torch.stack([result.mean for result in self._forwards(item.batch)])
        devices.synchronize(self._engine.ranks.device)

    @torch.no_grad()
    def _add_old(self, items: Sequence[_Item]) -> None:
        for item in items:
            results = self._forwards(item.batch)
            item.old_log_probs = torch.stack([result.log_prob for result in results])
            if self._kind.needs_old_mean:
                item.old_means = torch.stack([result.mean for result in results])
            self._totals.add_gap(item.batch, slice(None), item.old_log_probs)
        self._engine.reshard()
        devices.synchronize(self._engine.ranks.device)

    def _losses(self, item: _Item, k: int) -> Tensor:
        """(B,) with gradient."""
        batch, result = item.batch, self._forward(item.batch, k)
        if item.update == 0 and item.old_log_probs is None:
            self._totals.add_gap(batch, k, result.log_prob)
        output = self._loss(self._rows(item, k, result), self._limits)
        self._totals.add_ratios(batch, output.stats)
        loss: Tensor = output.loss
        if item.reference_means is None:
            return loss
        kl = reference_kl(result.mean, item.reference_means[k], result.std)
        self._totals.add_sums(batch, {"actor/kl_loss": kl.detach().sum()})
        return loss + self._part.kl_coef * kl

    def _rows(self, item: _Item, k: int, result: StepResult) -> PolicyRows:
        """What the loss may read. Without an old log-prob the old policy is the current one, or the rollout."""
        batch, bypass = item.batch, self._part.old_log_probs == "rollout"
        current = result.log_prob.detach() if item.old_log_probs is None else item.old_log_probs[k]
        correction = self._correction(batch, k, current, bypass=bypass)
        step = self._steps[k]
        dt = float(self._schedule.sigmas[step + 1] - self._schedule.sigmas[step])
        return PolicyRows(
            log_prob=result.log_prob,
            old_log_prob=batch.rollout_log_probs[k] if bypass else current,
            advantages=batch.advantages,
            weights=None if correction is None else correction.weights,
            mean=result.mean,
            old_mean=result.mean.detach() if item.old_means is None else item.old_means[k],
            std=result.std,
            dt=torch.full_like(result.std, dt),
        )

    def _correction(self, batch: StepsBatch, k: int, log_prob: Tensor, *, bypass: bool) -> Correction | None:
        """`log_prob` (B,): the old policy's, or the current one's when bypassing."""
        part = self._part.correction
        if part.mode == "none":
            return None
        rollout = batch.rollout_log_probs[k]
        correction = correct(part, log_prob, rollout, num_elements=self._num_elements, bypass=bypass)
        self._totals.add_sums(batch, correction.sums())
        return correction

    def _forwards(self, batch: StepsBatch) -> list[StepResult]:
        return [self._forward(batch, k) for k in range(len(self._steps))]

    def _forward(self, batch: StepsBatch, k: int) -> StepResult:
        """The k-th noisy step of the active policy."""
        step = self._steps[k]
        return reverse_step(self._noise.type)(
            batch.latents[k],
            velocity(self._engine, batch.latents[k], self._schedule.timesteps[step], batch),
            self._schedule.sigmas[step],
            self._schedule.sigmas[step + 1],
            eta=self._noise.eta,
            sigma_max=self._schedule.sigma_max,
            prev_sample=batch.next_latents[k],
        )
