"""The update of one step: reference means, old log-probs, then for each update forward, loss, backward and optimizer.

Every forward is the rollout's own: the adapter's `velocity` on the stored latents, then the reverse step evaluated at
the stored next latents. A row is one (sample, noisy step) pair; an update's loss is the mean over its rows on all
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowfleet import devices, lora
from flowfleet.algorithms.correction import correct
from flowfleet.algorithms.losses import LOSSES, PolicyRows, clip_range_from_nats, reference_kl
from flowfleet.algorithms.sde import STEPS, StepResult
from flowfleet.jobs import AlgorithmPart
from flowfleet.models import Schedule
from flowfleet.telemetry import Timings
from services.trainer.batches import Update
from services.trainer.engine import Engine
from services.trainer.inputs import Batch
from services.trainer.totals import Totals


@dataclass
class Prepared:
    """A micro-batch with what was computed before the step's first optimizer update."""

    batch: Batch
    old_log_probs: Tensor | None = None
    """(W, B); None where the update's own forward gives them."""
    reference_means: Tensor | None = None
    """(W, B, *latent), with KL only."""


class StepTrainer:
    """Trains on one step's samples."""

    def __init__(self, engine: Engine, schedule: Schedule, steps: Sequence[int], num_samples: int) -> None:
        """`steps`: the noisy denoising steps; `num_samples`: of the whole step, over all ranks."""
        spec = engine.spec
        self._engine = engine
        self._schedule = schedule
        self._steps = list(steps)
        self._rollout, self._algorithm = spec.rollout, spec.algorithm
        self._loss = LOSSES[spec.algorithm.name]
        shape = engine.adapter.latent_shape(spec.rollout.height, spec.rollout.width)
        nats = spec.algorithm.clip_nats
        self._clip_range = spec.algorithm.clip_range if nats is None else clip_range_from_nats(nats, math.prod(shape))
        self._totals = Totals(engine.ranks, len(self._steps), num_samples)

    def train(
        self, updates: Sequence[Update], batches: Sequence[Sequence[Batch]], timings: Timings
    ) -> dict[str, float]:
        """Collective. Runs all updates; metrics are equal on every rank. `batches[u]`: this rank's of update u."""
        prepared = [[Prepared(batch) for batch in part] for part in batches]
        if self._algorithm.kl_coef > 0:
            with timings("ref"):
                self._add_references([item for part in prepared for item in part])
        if late := [item for number, part in enumerate(prepared) if self._needs_pass(number) for item in part]:
            with timings("old_log_prob"):
                self._add_old_log_probs(late)
        with timings("update_actor"):
            for number, (update, part) in enumerate(zip(updates, prepared, strict=True)):
                self._update(update, part, is_first=number == 0)
        return self._totals.metrics(len(updates))

    @torch.no_grad()
    def _add_references(self, items: Sequence[Prepared]) -> None:
        with lora.adapter_disabled(self._engine.model):
            for item in items:
                item.reference_means = torch.stack([result.mean for result in self._forwards(item.batch)])
        self._settle()

    @torch.no_grad()
    def _add_old_log_probs(self, items: Sequence[Prepared]) -> None:
        for item in items:
            item.old_log_probs = torch.stack([result.log_prob for result in self._forwards(item.batch)])
            self._totals.add_gap(item.batch, slice(None), item.old_log_probs)
        self._settle()

    def _needs_pass(self, update: int) -> bool:
        """An update's first forward is the old policy's only until the optimizer has moved the weights."""
        mode = self._algorithm.old_log_probs
        return mode == "recompute" or (mode == "first_forward" and update > 0)

    def _update(self, update: Update, items: Sequence[Prepared], *, is_first: bool) -> None:
        weight = 1 / (update.num_samples * len(self._steps))
        forwards = [(item, k) for item in items for k in range(len(self._steps))]
        for number, (item, k) in enumerate(forwards, start=1):
            self._engine.set_last_backward(number == len(forwards))
            losses = self._losses(item, k, is_first=is_first)
            scale = 0.0 if item.batch.is_padding else weight
            loss = losses.sum() * scale * self._engine.ranks.world_size  # FSDP averages over the ranks
            loss.backward()  # type: ignore[no-untyped-call]
            self._totals.add_loss(losses.detach().sum() * scale)
        self._totals.add_outcome(self._engine.optimizer.step())
        devices.synchronize(self._engine.ranks.device)

    def _losses(self, item: Prepared, k: int, *, is_first: bool) -> Tensor:
        """(B,) with gradient."""
        batch, result = item.batch, self._forward(item.batch, k)
        if is_first and item.old_log_probs is None:
            self._totals.add_gap(batch, k, result.log_prob)
        old = None if item.old_log_probs is None else item.old_log_probs[k]
        rows = policy_rows(self._algorithm, result.log_prob, old, batch.rollout_log_probs[k], batch.advantages)
        output = self._loss(rows, clip_range=self._clip_range, max_advantage=self._algorithm.advantage_clamp)
        if not batch.is_padding:
            self._totals.add_ratios(output.stats)
        if item.reference_means is None:
            return output.loss
        kl = reference_kl(result.mean, item.reference_means[k], result.std)
        if not batch.is_padding:
            self._totals.add_kl(kl)
        return output.loss + self._algorithm.kl_coef * kl

    def _forwards(self, batch: Batch) -> Iterator[StepResult]:
        return (self._forward(batch, k) for k in range(len(self._steps)))

    def _forward(self, batch: Batch, k: int) -> StepResult:
        """The k-th noisy step of the current policy."""
        step = self._steps[k]
        velocity = self._engine.adapter.velocity(
            self._engine.model,
            batch.latents[k],
            self._schedule.timesteps[step],
            batch.prompts,
            height=self._rollout.height,
            width=self._rollout.width,
            negative=batch.negative,
            guidance_scale=self._rollout.guidance_scale,
        )
        return STEPS[self._rollout.noise.type](
            batch.latents[k],
            velocity,
            self._schedule.sigmas[step],
            self._schedule.sigmas[step + 1],
            eta=self._rollout.noise.eta,
            sigma_max=self._schedule.sigma_max,
            prev_sample=batch.next_latents[k],
        )

    def _settle(self) -> None:
        self._engine.reshard()
        devices.synchronize(self._engine.ranks.device)


def policy_rows(
    algorithm: AlgorithmPart, log_prob: Tensor, old: Tensor | None, rollout: Tensor, advantages: Tensor
) -> PolicyRows:
    """What the loss needs of B rows. `log_prob` has the gradient; `old` None: the old policy is the current one.

    `importance_cap` weighs a row by min(cap, exp(old - rollout)). In the mode "rollout" the ratio of the loss is
    against the rollout already, so the weight is what truncates that ratio at the cap: min(cap, rho) / rho.
    """
    if algorithm.old_log_probs != "rollout":
        old = log_prob.detach() if old is None else old
        cap = algorithm.importance_cap
        importance = None if cap is None else correct("truncated", old, rollout, threshold=cap).weights
        return PolicyRows(log_prob, old, advantages, importance)
    assert algorithm.importance_cap is not None, "the job's schema asks for it"
    truncated = correct("truncated", log_prob, rollout, threshold=algorithm.importance_cap)
    assert truncated.weights is not None
    return PolicyRows(log_prob, rollout, advantages, truncated.weights / truncated.log_ratio.exp())
