"""The objective of policy losses: on the log-probs of the noisy steps that the rollout stored.

Every forward is the rollout's own: the adapter's `velocity` on the stored latents, then the reverse step evaluated at
the stored next latents.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Literal, cast

import torch
from torch import Tensor

from flowfleet.algorithms.correction import Correction, correct
from flowfleet.algorithms.losses import PolicyRows, limits, reference_kl
from flowfleet.algorithms.parts import scaled
from flowfleet.algorithms.sde import StepResult
from flowfleet.algorithms.step_weights import step_weights
from services.trainer.step.inputs import StepsBatch
from services.trainer.step.objectives.base import Forward, RatioObjective, StepInputs, latent_parts, stored_step

_Name = Literal["old_log_prob", "old_mean", "reference_mean", "weights", "log_ratio", "outside"]


class PolicyObjective(RatioObjective):
    """See `Objective`. A round is a noisy step."""

    def __init__(self, inputs: StepInputs) -> None:
        super().__init__(inputs)
        engine, spec = inputs.engine, inputs.engine.spec
        self._steps = list(inputs.sde_steps)
        self._sizes = engine.sizes
        self._weights = cache(lambda size: step_weights(spec, self._sizes.of(size).schedule))
        self._limits = cache(lambda size: limits(spec.algorithm, self._sizes.of(size).num_elements))
        inputs.totals.limits = self._limits(spec.rollout.size) if spec.algorithm.reads("clip_range") else None

    @property
    def num_rounds(self) -> int:
        return len(self._steps)

    def forwards(self, update: int) -> list[Forward]:
        is_first = update == 0 and self._num_passes == 1
        return [
            Forward(batch, self._engine.component(timesteps[step]), partial(self._losses, batch, k, is_first=is_first))
            for batch in self._batches[update]
            for timesteps in (self._sizes.of(batch.size).schedule.timesteps,)
            for k, step in enumerate(self._steps)
        ]

    def _add(self, name: _Name, batch: StepsBatch, values: Tensor) -> None:
        """`values`: (W, B, ...)."""
        self._keep(name, batch, values.unbind(1))

    def _of(self, name: _Name, batch: StepsBatch, k: int) -> Tensor | None:
        """(B, ...) of the k-th noisy step; None where it was not computed."""
        kept = self._kept(name, batch)
        return None if kept is None else torch.stack([values[k] for values in kept])

    def _add_references(self, batches: Sequence[StepsBatch]) -> None:
        for batch in batches:
            self._add(
                "reference_mean", batch, torch.stack([self._mean(batch, result) for result in self._forwards(batch)])
            )

    def _add_old(self, batches: Sequence[StepsBatch]) -> None:
        for batch in batches:
            results = self._forwards(batch)
            log_probs = torch.stack([result.log_prob for result in results])
            self._add("old_log_prob", batch, log_probs)
            if self._spec.loss.needs_old_mean:
                self._add("old_mean", batch, torch.stack([self._mean(batch, result) for result in results]))
            self._totals.add_gap(batch, slice(None), log_probs)
        if self._part.correction.needs_all_rows:
            self._add_weights(batches)

    def _add_weights(self, batches: Sequence[StepsBatch]) -> None:
        """Corrections that look at more than one row."""
        for batch in batches:
            old = torch.stack([cast(Tensor, self._of("old_log_prob", batch, k)) for k in range(self.num_rounds)])
            correction = correct(self._part.correction, old, batch.rollout_log_probs, bypass=False)
            assert correction.weights is not None
            self._add("weights", batch, correction.weights)
            self._add("log_ratio", batch, correction.log_ratio)
            self._add("outside", batch, correction.outside)

    def _losses(self, batch: StepsBatch, k: int, *, is_first: bool) -> Tensor:
        """(B,) with gradient. `is_first`: the weights are those before the step."""
        result = stored_step(self._engine, batch, k, self._steps[k])
        if is_first and self._of("old_log_prob", batch, k) is None:
            self._totals.add_gap(batch, k, result.log_prob)
        rows = self._rows(batch, k, result)
        output = self._loss(rows, self._limits(batch.size))
        self._totals.add_ratios(batch, output.stats)
        self._totals.add_changes(batch, result.log_prob.detach() - rows.old_log_prob)
        loss: Tensor = output.loss * self._weights(batch.size)[self._steps[k]]
        reference_mean = self._of("reference_mean", batch, k)
        if reference_mean is None:
            return loss
        kl = reference_kl(self._mean(batch, result), reference_mean, result.std)
        self._totals.add_sums(batch, {"actor/kl_loss": kl.detach().sum()})
        return loss + self._spec.kl.kl_coef * batch.ties * kl

    def _rows(self, batch: StepsBatch, k: int, result: StepResult) -> PolicyRows:
        """Collects the values that the loss may read. The old log-prob is the rollout's with `old_log_probs =
        "rollout"`, else the one that was computed before, else the current policy's."""
        bypass = self._part.old_log_probs == "rollout"
        old, old_mean = self._of("old_log_prob", batch, k), self._of("old_mean", batch, k)
        current = result.log_prob.detach() if old is None else old
        correction = self._correction(batch, k, current, bypass=bypass)
        step, mean, sigmas = self._steps[k], self._mean(batch, result), self._sizes.of(batch.size).schedule.sigmas
        dt = float(sigmas[step + 1] - sigmas[step])
        return PolicyRows(
            log_prob=result.log_prob,
            old_log_prob=batch.rollout_log_probs[k] if bypass else current,
            advantages=batch.advantages,
            weights=None if correction is None else correction.weights,
            mean=mean,
            old_mean=mean.detach() if old_mean is None else old_mean,
            std=result.std,
            dt=torch.full_like(result.std, dt),
        )

    def _correction(self, batch: StepsBatch, k: int, log_prob: Tensor, *, bypass: bool) -> Correction | None:
        """`log_prob` (B,): the old policy's, or the current one's when bypassing."""
        part = self._part.correction
        if part.mode == "none":
            return None
        if part.needs_all_rows:
            names: tuple[_Name, ...] = ("weights", "log_ratio", "outside")
            correction = Correction(*(cast(Tensor, self._of(name, batch, k)) for name in names))
        else:
            rollout = batch.rollout_log_probs[k]
            correction = correct(part, log_prob, rollout, bypass=bypass)
        self._totals.add_sums(batch, correction.sums())
        return correction

    def _mean(self, batch: StepsBatch, result: StepResult) -> Tensor:
        """The step's mean as losses square it."""
        return scaled(result.mean, latent_parts(self._engine, batch))

    def _forwards(self, batch: StepsBatch) -> list[StepResult]:
        return [stored_step(self._engine, batch, k, step) for k, step in enumerate(self._steps)]
