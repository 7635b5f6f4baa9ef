"""Sums behind a step's metrics: of this rank while it trains, over all ranks at the end."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from flowfleet.algorithms.correction import MAX_LOG_RATIO, agreement_metrics
from flowfleet.algorithms.losses import Limits, RatioStats
from flowfleet.process.telemetry import LOG_PROB_NOT_FINITE
from services.trainer.optim.adamw import UpdateOutcome
from services.trainer.parallel.ranks import Ranks
from services.trainer.step.inputs import Batch, StepsBatch
from services.trainer.step.sequences import SequenceBatch


class Totals:
    """Totals of one step. Padding adds no value to any sum, only names."""

    def __init__(self, ranks: Ranks, num_steps: int, num_samples: int, *, counts: bool = True) -> None:
        """`num_steps`: noisy ones, 0 for losses that read none; `num_samples`: of the step, over all ranks; `counts`:
        False if another rank with the same samples adds them up."""
        self._ranks, self._counts = ranks, counts
        self.num_steps, self._num_samples = num_steps, num_samples
        self.limits: Limits | None = None
        """Limits of the loss on the ratio of log-probs; none if it limits something else."""
        self._gaps: list[tuple[int | slice, list[int], Tensor]] = []
        self._loss = torch.zeros((), device=ranks.device)
        self._sums: dict[str, Tensor] = {}
        self._num_rows = 0
        self._ratios: RatioStats | None = None
        self._outcomes: list[UpdateOutcome] = []
        self._changes: list[tuple[list[int], Tensor]] = []

    def add_gap(self, batch: StepsBatch | SequenceBatch, k: int | slice, log_probs: Tensor) -> None:
        """Trainer's log-probs, (B,) or (W, B), of the policy before the step: how far are they from the rollout's?"""
        if self._skips(batch):
            return
        self._gaps.append((k, list(batch.rows), log_probs.detach() - batch.rollout_log_probs[k]))

    def add_loss(self, batch: Batch, loss: Tensor) -> None:
        """0-d of a forward, already weighted: the sum over forwards and ranks is the update's loss."""
        self._loss += loss if self._counts else 0.0
        self._num_rows += 0 if self._skips(batch) else len(batch.rows)

    def add_sums(self, batch: Batch, sums: Mapping[str, Tensor]) -> None:
        """Metric name to its 0-d sum over a forward's rows; the metric is the mean over all rows of the step."""
        for name, value in sums.items():
            value = torch.zeros_like(value) if self._skips(batch) else value
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_ratios(self, batch: Batch, stats: RatioStats) -> None:
        if not self._skips(batch):
            self._ratios = stats if self._ratios is None else self._ratios + stats

    def add_changes(self, batch: Batch, changes: Tensor) -> None:
        """(B,): how far each row's log-prob is from the old policy's. They stay on the device until the step's end."""
        if not self._skips(batch):
            self._changes.append((list(batch.rows), changes.detach()))

    def _skips(self, batch: Batch) -> bool:
        return batch.is_padding or not self._counts

    def sample_ratios(self) -> list[float]:
        """Collective. For each sample of the step exp of its mean change; empty where the loss has none."""
        sums = torch.zeros(2, self._num_samples, dtype=torch.float64)  # of changes, and how many
        if self._changes:
            rows = torch.tensor([row for rows, _ in self._changes for row in rows])
            changes = torch.cat([changes for _, changes in self._changes]).cpu().double()
            sums[0].index_add_(0, rows, changes)
            sums[1].index_add_(0, rows, torch.ones_like(changes))
        total, count = self._ranks.sum(sums)
        if not count.any():
            return []
        return (total / count).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().tolist()  # type: ignore[no-any-return]

    def add_outcome(self, outcome: UpdateOutcome) -> None:
        self._outcomes.append(outcome)

    def metrics(self) -> dict[str, float]:
        """Collective; equal on every rank."""
        last = self._outcomes[-1]
        norms = [outcome.grad_norm for outcome in self._outcomes if outcome.applied]
        skipped = sum(not outcome.applied for outcome in self._outcomes)
        mine = self._ratios or RatioStats(torch.zeros(6), torch.full((2,), -math.inf))  # of padding alone, say
        ratios = RatioStats(self._ranks.sum(mine.sums.double()), self._ranks.max(mine.extremes.double()))
        return {
            "actor/kl_loss": 0.0,
            **self._means(len(self._outcomes)),
            "actor/grad_norm": math.fsum(norms) / len(norms) if norms else math.nan,
            "actor/skipped_updates": float(skipped),
            "actor/lr": last.lr,
            **({} if last.loss_scale == 1 else {"actor/loss_scale": last.loss_scale}),
            **ratios.metrics(),
            **self._agreement(),
        }

    def _means(self, num_updates: int) -> dict[str, float]:
        """The loss, a mean over the updates, and the sums, means over the rows."""
        names = sorted(self._sums)
        rows = torch.tensor(float(self._num_rows), device=self._loss.device)
        mine = torch.stack([rows.double(), self._loss.double(), *(self._sums[name].double() for name in names)])
        num_rows, loss, *sums = self._ranks.sum(mine).tolist()
        return {"actor/loss": loss / num_updates} | {
            name: value / num_rows for name, value in zip(names, sums, strict=True)
        }

    def _agreement(self) -> dict[str, float]:
        """exp(trainer - rollout) of every row that was measured; in deterministic mode exactly 1. Rows where it is no
        finite number are counted, and left out of the rest."""
        if self.num_steps == 0:
            return {}
        gaps = torch.zeros(
            2, self.num_steps, self._num_samples, dtype=torch.float64
        )  # value, and whether it was measured
        for k, columns, gap in self._gaps:
            gaps[0, k, columns] = gap.cpu().double()
            gaps[1, k, columns] = 1.0
        gaps = self._ranks.sum(gaps)
        measured = gaps[0][gaps[1] > 0]
        if len(measured) == 0:
            return {}
        known = measured[measured.isfinite()].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        not_finite = {LOG_PROB_NOT_FINITE: 1 - len(known) / len(measured)}
        if len(known) == 0:
            return not_finite
        ratio = known.exp()
        return {
            **not_finite,
            **agreement_metrics(known, self.limits),
            "rollout_corr/ratio_min": ratio.min().item(),
            "rollout_corr/ratio_max": ratio.max().item(),
            "rollout_corr/ratio_max_abs_dev": (ratio - 1).abs().max().item(),
        }
