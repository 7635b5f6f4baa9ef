"""Floating-point operations of a model's forward: counted, not looked up, so that every family has them.

The model's own code runs on the meta device and torch counts its matrix products, convolutions and attention (a
multiply-add is two). What is point-wise does not count. These are model FLOPs: recomputation is no work done.

Convention of a training row (a sample at one noise level) and forward: full fine-tuning is 3 F, the forward, and in the
backward the gradients of inputs and of weights. LoRA is 2 F + 3 A, where F is the base's forward and A the adapter's,
for frozen weights get no gradient. With guidance a row has two branches. MFU is this over time and the devices' peak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flowfleet.job.spec import JobSpec
from flowfleet.models.base import ModelAdapter
from flowfleet.models.settings import Size
from flowfleet.planning.skeleton import (
    META,
    MetaRun,
    blank_prompts,
    extrapolated,
    inject_lora,
    load_skeleton,
    shortened,
)
from flowfleet.weights.weights import dtype_of

NODES = (64, 128, 192)
"""Text tokens at which a forward is counted."""


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one sample and one forward, by the number of text tokens: matrix products are linear in it and attention
    is quadratic, so three counts give all."""

    counts: tuple[float, float, float]
    """At `NODES`."""

    def at(self, num_text_tokens: float) -> float:
        """Lagrange's polynomial through the counts."""
        total = 0.0
        for node, count in zip(NODES, self.counts, strict=True):
            for other in NODES:
                count *= (num_text_tokens - other) / (node - other) if other != node else 1.0
            total += count
        return total


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a job's model, per row and forward."""

    base: ForwardFlops
    adapted: ForwardFlops | None
    """FLOPs with LoRA's own; None for full fine-tuning."""

    def sampling(self, num_text_tokens: float) -> float:
        """FLOPs of a forward without gradient."""
        return (self.adapted or self.base).at(num_text_tokens)

    def training(self, num_text_tokens: float) -> float:
        """FLOPs of a forward and its backward; see the module."""
        base = self.base.at(num_text_tokens)
        if self.adapted is None:
            return 3 * base
        return 2 * base + 3 * (self.adapted.at(num_text_tokens) - base)


def model_flops(spec: JobSpec) -> ModelFlops:
    """Counts the FLOPs of a job's transformer from its folder's configurations. Raises ValueError as `load_skeleton`
    does."""
    model = spec.model
    skeleton = load_skeleton(
        model.path, dtype_of(model.dtype), components=("transformer",), max_sequence_length=model.max_sequence_length
    )
    skeleton.resize_conditions(spec.rollout.condition_pixels)
    return count_model(skeleton, spec)


def count_model(skeleton: ModelAdapter, spec: JobSpec) -> ModelFlops:
    """The same of a skeleton, whose first expert is as before afterwards but for an adapter in its kept blocks."""
    expert = next(iter(skeleton.experts.values()))
    with shortened(expert) as stands_for:
        base = _forward(skeleton, spec.rollout.size, stands_for)
        if spec.trainer.mode == "full":
            return ModelFlops(base, None)
        inject_lora(expert, spec.trainer.lora, skeleton.lora_targets)
        return ModelFlops(base, _forward(skeleton, spec.rollout.size, stands_for))


def flops_of(run: Callable[[], object]) -> float:
    """Counted in a run on the meta device, without gradient."""
    with torch.no_grad(), MetaRun(), FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())


def _forward(skeleton: ModelAdapter, size: Size, stands_for: dict[nn.Module, int]) -> ForwardFlops:
    first, second, third = (_count(skeleton, size, stands_for, node) for node in NODES)
    return ForwardFlops((first, second, third))


def _count(skeleton: ModelAdapter, size: Size, stands_for: dict[nn.Module, int], num_text_tokens: int) -> float:
    latents = torch.empty(1, *skeleton.latent_shape(size), device=META)
    prompts = blank_prompts(skeleton, 1, num_text_tokens, size)
    with FlopCounterMode(display=False) as counter:
        return extrapolated(
            stands_for,
            lambda: float(counter.get_total_flops()),
            lambda: forward(skeleton, latents, prompts, size),
        )


def forward(skeleton: ModelAdapter, latents: torch.Tensor, prompts: object, size: Size) -> None:
    """Runs one forward of the first expert, without gradient."""
    with torch.no_grad(), MetaRun():
        skeleton.velocity(latents, torch.tensor(1000.0), prompts, size=size)  # type: ignore[arg-type]
