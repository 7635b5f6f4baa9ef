"""Images per second of one device that samples and trains for itself, predicted from FLOPs and the device's peak.

Shares of the bf16 peak are those of Qwen-Image on an H200 at 512x512 with compiled blocks (docs/results.md). Other
models, small batches and other devices differ: it is an estimate, and reports say so.
"""

from __future__ import annotations

from typing import Final

from flowfleet.hardware.cards import Card
from flowfleet.job.spec import JobSpec
from flowfleet.planning.work import Work

SAMPLING: Final = {"plain": 0.55, "fp8": 0.70}
TRAINING: Final = {"plain": 0.46, "fp8": 0.60}
"""Shares by `model.base`; an fp8 product is twice as fast, what lies between products is not."""
KEPT: Final = {"none": 1.0, "selective": 0.85, "full": 0.67}
"""Part of the time that is not spent on computing activations again, by `trainer.gradient_checkpointing`."""


def images_per_s(spec: JobSpec, work: Work, card: Card) -> float:
    """Raises ValueError for a float8 base on a card without such products."""
    base = spec.model.base
    if base == "fp8" and not card.has_fp8:
        raise ValueError(f'model.base = "fp8": {card.part} has no float8 products, set model.base to "plain"')
    sampling = work.rollout_flops_per_sample / SAMPLING[base]
    training = work.train_flops_per_sample / (TRAINING[base] * KEPT[spec.trainer.gradient_checkpointing])
    return card.peak_flops / (sampling + training * work.trained / work.samples)
