"""What a step's metrics are made of: sums of this rank while it trains, over all ranks in the end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowfleet.algorithms.correction import MAX_LOG_RATIO, agreement_metrics
from flowfleet.algorithms.losses import RatioStats
from services.trainer.inputs import Batch
from services.trainer.optimizer import UpdateOutcome
from services.trainer.ranks import Ranks


class Totals:
    """Of one step. Padding brings nothing into any sum."""

    def __init__(self, ranks: Ranks, num_steps: int, num_samples: int) -> None:
        self._ranks = ranks
        self._shape = num_steps, num_samples
        self._gaps: list[tuple[int | slice, list[int], Tensor]] = []
        zero = torch.zeros((), device=ranks.device)
        self._loss, self._kl = zero.clone(), zero.clone()
        self._ratios: RatioStats | None = None
        self._outcomes: list[UpdateOutcome] = []

    def add_gap(self, batch: Batch, k: int | slice, log_probs: Tensor) -> None:
        """Trainer's log-probs, (B,) or (W, B), of the policy before the step: how far are they from the rollout's?"""
        if batch.is_padding:
            return
        gap = (log_probs.detach() - batch.rollout_log_probs[k]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        self._gaps.append((k, list(batch.rows), gap))

    def add_loss(self, loss: Tensor) -> None:
        """0-d, already weighted: the sum over micro-batches and ranks is the update's loss."""
        self._loss += loss

    def add_ratios(self, stats: RatioStats) -> None:
        self._ratios = stats if self._ratios is None else self._ratios + stats

    def add_kl(self, kl: Tensor) -> None:
        """(B,)"""
        self._kl += kl.detach().sum()

    def add_outcome(self, outcome: UpdateOutcome) -> None:
        self._outcomes.append(outcome)

    def metrics(self, num_updates: int) -> dict[str, float]:
        """Collective; equal on every rank."""
        ratios = self._over_ranks()
        rows = float(ratios.sums[0])
        loss, kl = self._ranks.sum(torch.stack([self._loss, self._kl]).double()).tolist()
        norms = [outcome.grad_norm for outcome in self._outcomes if outcome.applied]
        skipped = sum(not outcome.applied for outcome in self._outcomes)
        return {
            "actor/loss": loss / num_updates,
            "actor/kl_loss": kl / rows,
            "actor/grad_norm": math.fsum(norms) / len(norms) if norms else math.nan,
            "actor/skipped_updates": float(skipped),
            **ratios.metrics(),
            **self._agreement(),
        }

    def _over_ranks(self) -> RatioStats:
        """A rank that had only padding brings nothing."""
        mine = self._ratios or RatioStats(torch.zeros(6), torch.full((2,), -math.inf))
        return RatioStats(self._ranks.sum(mine.sums.double()), self._ranks.max(mine.extremes.double()))

    def _agreement(self) -> dict[str, float]:
        """exp(trainer - rollout) of every row that was measured; in deterministic mode exactly 1."""
        gaps = torch.zeros(2, *self._shape, dtype=torch.float64)  # value, and whether it was measured
        for k, columns, gap in self._gaps:
            gaps[0, k, columns] = gap.cpu().double()
            gaps[1, k, columns] = 1.0
        gaps = self._ranks.sum(gaps)
        known = gaps[0][gaps[1] > 0]
        if len(known) == 0:
            return {}
        ratio = known.exp()
        return {
            **agreement_metrics(known),
            "rollout_corr/ratio_min": ratio.min().item(),
            "rollout_corr/ratio_max": ratio.max().item(),
            "rollout_corr/ratio_max_abs_dev": (ratio - 1).abs().max().item(),
        }
