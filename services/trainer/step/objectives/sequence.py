"""The objective of losses on tokens: on the log-probs of what the rollout wrote.

Every forward is the adapter's `log_probs` on a packed row; one forward has all tokens of its sequences, so a correction
at the level of sequences needs no pass of its own.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor

from flowfleet.algorithms.correction import Correction, correct
from flowfleet.algorithms.losses import limits
from flowfleet.algorithms.sequences.losses import SequenceRows, divisors, reference_kl_k3
from flowfleet.algorithms.settings import AggregationSettings
from flowfleet.models.sequences.adapter import MODEL, SequenceAdapter
from flowfleet.process.telemetry import Timings
from services.trainer.step.inputs import Batch
from services.trainer.step.objectives.base import Forward, RatioObjective, StepInputs
from services.trainer.step.sequences import SequenceBatch

_Name = Literal["old", "reference"]


class SequenceObjective(RatioObjective):
    """See `Objective`. A row is a sequence, in one round."""

    num_rounds = 1

    def __init__(self, inputs: StepInputs) -> None:
        super().__init__(inputs)
        engine, totals, spec = inputs.engine, inputs.totals, inputs.engine.spec
        self._aggregation = spec.algorithm.of(AggregationSettings).aggregation
        self._adapter = cast(SequenceAdapter, engine.adapter)
        self._limits = limits(spec.algorithm, 1)
        totals.num_steps = 1
        totals.limits = self._limits if spec.loss.by_sequence else None
        self._mean_lengths: list[float] = []
        """Trained tokens per sequence of each update, over all ranks."""

    def prepare(self, batches: Sequence[Sequence[Batch]], timings: Timings) -> None:
        super().prepare(batches, timings)
        self._mean_lengths = self._lengths()

    def _add_references(self, batches: Sequence[SequenceBatch]) -> None:
        for batch in batches:
            self._keep("reference", batch, batch.split(self._log_probs(batch)))

    def _add_old(self, batches: Sequence[SequenceBatch]) -> None:
        for batch in batches:
            log_probs = self._log_probs(batch)
            self._keep("old", batch, batch.split(log_probs))
            self._totals.add_gap(batch, 0, batch.means(log_probs))

    def forwards(self, update: int) -> list[Forward]:
        is_first = update == 0 and self._num_passes == 1
        return [
            Forward(batch, MODEL, partial(self._losses, batch, self._mean_lengths[update], is_first=is_first))
            for batch in self._batches[update]
        ]

    def _lengths(self) -> list[float]:
        """Collective."""
        of_updates = [[batch for batch in part if not batch.is_padding] for part in self._batches]
        mine = [
            [float(sum(sum(batch.lengths) for batch in part)), float(sum(len(batch.rows) for batch in part))]
            for part in of_updates
        ]
        return [tokens / rows for tokens, rows in self._engine.ranks.sum(torch.tensor(mine).double()).tolist()]

    def _of(self, name: _Name, batch: SequenceBatch) -> Tensor | None:
        """(N,) log-probs of the trained tokens; None where they were not computed."""
        kept = self._kept(name, batch)
        return None if kept is None else torch.cat(kept)

    def _log_probs(self, batch: SequenceBatch) -> Tensor:
        """(N,) of the active policy's trained tokens."""
        self._engine.ranks.beats.beat()
        log_probs = self._adapter.log_probs(batch.sequences, temperature=self._spec.rollout.sequence.temperature)
        return log_probs[batch.mask]

    def _losses(self, batch: SequenceBatch, mean_length: float, *, is_first: bool) -> Tensor:
        """(B,) with gradient. `is_first`: the weights are those before the step."""
        log_prob, known = self._log_probs(batch), self._of("old", batch)
        current = log_prob.detach() if known is None else known
        if is_first and known is None:
            self._totals.add_gap(batch, 0, batch.means(log_prob.detach()))
        bypass = self._part.old_log_probs == "rollout"
        rows = SequenceRows(
            log_prob=log_prob,
            old_log_prob=batch.rollout_tokens if bypass else current,
            advantages=batch.advantages,
            owners=batch.owners,
            divisors=divisors(torch.tensor(batch.lengths, device=log_prob.device), self._aggregation, mean_length),
            weights=self._weights(batch, current, bypass=bypass),
        )
        output = self._loss(rows, self._limits)
        self._totals.add_ratios(batch, output.stats)
        self._totals.add_changes(batch, batch.means(log_prob.detach() - rows.old_log_prob))
        loss: Tensor = output.loss
        reference = self._of("reference", batch)
        if reference is None:
            return loss
        kl = rows.aggregated(reference_kl_k3(log_prob, reference))
        self._totals.add_sums(batch, {"actor/kl_loss": kl.detach().sum()})
        return loss + self._spec.kl.kl_coef * kl

    def _weights(self, batch: SequenceBatch, log_prob: Tensor, *, bypass: bool) -> Tensor | None:
        """(N,) of the correction; `log_prob` (N,): the old policy's, or the current one's when bypassing."""
        part = self._part.correction
        if part.mode == "none":
            return None
        corrections: list[Correction] = [
            correct(part, own[:, None], rollout[:, None], bypass=bypass)
            for own, rollout in zip(batch.split(log_prob), batch.split(batch.rollout_tokens), strict=True)
        ]
        means = [{name: value / len(item.log_ratio) for name, value in item.sums().items()} for item in corrections]
        self._totals.add_sums(batch, {name: torch.stack([mean[name] for mean in means]).sum() for name in means[0]})
        return torch.cat([cast(Tensor, item.weights)[:, 0] for item in corrections])
