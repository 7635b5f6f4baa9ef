"""Model FLOPs utilization of a step: its rows' cost (flowfleet/planning/flops.py) over time and the devices' peak."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from flowfleet.algorithms.settings import RatioSettings
from flowfleet.hardware import devices
from flowfleet.job.spec import JobSpec
from flowfleet.planning.flops import ModelFlops, model_flops
from flowfleet.planning.sequence_flops import SequenceFlops, sequence_flops
from services.trainer.model.policies import needs_reference
from services.trainer.parallel.ranks import Ranks
from services.trainer.step.inputs import Batch, FlowBatch
from services.trainer.step.sequences import SequenceBatch

log = logging.getLogger(__name__)

INFERRED = ("old_log_prob", "ref")
"""Phases of a step that only go forward."""


class Mfu:
    """Model FLOPs utilization of a job. Empty unless every rank knows its device's peak and the model's cost."""

    def __init__(self, spec: JobSpec, ranks: Ranks, adapter: Any = None) -> None:
        """Collective. `adapter`: the loaded model of a job whose policy writes text."""
        self._spec = spec
        self._ranks = ranks
        peak = devices.peak_flops(ranks.device)
        flops = None if peak is None else _counted(spec, adapter)
        known, self._capacity = ranks.sum(torch.tensor([flops is not None, peak or 0.0], dtype=torch.float64)).tolist()
        self._flops = flops if known == ranks.world_size else None

    def metrics(
        self, batches: Sequence[Sequence[Batch]], num_rounds: int, seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Collective. `perf/mfu/actor`, and `perf/mfu/actor_infer` of a policy loss that inferred before its updates.

        Args:
            batches: this rank's of each update of one pass; all passes have the same rows.
            num_rounds: rows of a sample.
            seconds: of the step's phases, by name.
        """
        if self._flops is None:  # on every rank
            return {}
        cost = _of_sequences if isinstance(self._flops, SequenceFlops) else _of_rows
        forwards = [cost(part, self._flops.sampling) * num_rounds for part in batches]
        rows = sum(cost(part, self._flops.training) * num_rounds for part in batches)
        backwards = rows * self._spec.trainer.passes
        inferred = sum(count * work for count, work in zip(self._passes(len(batches)), forwards, strict=True))
        mine = torch.tensor([backwards, inferred], dtype=torch.float64)
        updated, looked = (self._ranks.sum(mine) / self._spec.trainer.mesh.degree).tolist()  # ranks that share samples
        metrics = {"perf/mfu/actor": updated / (seconds["update_actor"] * self._capacity)}
        spent = sum(seconds.get(name, 0.0) for name in INFERRED)
        return metrics | {"perf/mfu/actor_infer": looked / (spent * self._capacity)} if looked and spent else metrics

    def _passes(self, num_updates: int) -> list[int]:
        """Forwards without gradient of a row, by update; losses without a ratio make theirs elsewhere."""
        is_flow = not self._spec.writes_tokens
        if self._spec.trains_on_gradients or (is_flow and not self._spec.records_steps):
            return [0] * num_updates
        if not self._spec.loss.traits.has_ratio:
            return [1] * num_updates
        bypass = self._spec.algorithm.of(RatioSettings).old_log_probs == "rollout"
        reference = int(needs_reference(self._spec))
        late = 0 if self._spec.recomputes_all else num_updates if bypass else 1
        return [reference + int(number >= late) for number in range(num_updates)]


def _of_rows(batches: Sequence[Batch], flops: Callable[..., float]) -> float:
    """Forwards of this rank's rows, guidance included."""
    total = 0.0
    for batch in cast(Sequence[FlowBatch], batches):
        if batch.is_padding:
            continue
        each = flops(batch.prompts.embeds.shape[1])
        if batch.negative is not None:
            each += flops(batch.negative.embeds.shape[1])
        total += len(batch.rows) * each
    return total


def _of_sequences(batches: Sequence[Batch], flops: Callable[..., float]) -> float:
    """Forwards of this rank's sequences."""
    trained = [batch for batch in cast(Sequence[SequenceBatch], batches) if not batch.is_padding]
    sequences = [sequence for batch in trained for sequence in batch.sequences]
    return flops([sequence.num_inputs for sequence in sequences], [len(sequence.token_ids) for sequence in sequences])


def _counted(spec: JobSpec, adapter: Any) -> ModelFlops | SequenceFlops | None:
    """None for a model of a plugin that does not run on the meta device, or a folder that lacks a file: that is no
    reason not to train it."""
    if spec.writes_tokens:
        return sequence_flops(adapter)
    try:
        return model_flops(spec)
    except (RuntimeError, ValueError, OSError):
        log.warning("perf/mfu not reported: the model's FLOPs cannot be counted", exc_info=True)
        return None
