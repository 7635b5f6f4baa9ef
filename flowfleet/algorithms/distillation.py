"""Distillation losses: the policy's stored noisy steps compared with those that a teacher would take from there.

A row is one (sample, step) pair. As with the policy losses nothing is reduced: losses come back as (B,), statistics as
sums over rows. No log-prob, no advantage and no old policy is read, so it is no matter which sampler made the states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowfleet.algorithms.losses import reference_kl
from flowfleet.algorithms.matching.losses import MatchingOutput
from flowfleet.algorithms.settings import DistillationSettings


@dataclass(frozen=True, slots=True)
class DistillationRows:
    """Inputs of a distillation loss: B rows."""

    mean: Tensor
    """(B, ...) of the policy's reverse step, with gradient."""
    teacher_mean: Tensor
    """(B, ...) of the teacher's reverse step from the same latents."""
    std: Tensor
    """(B,) of the whole step, the same for both."""


DistillationOutput = MatchingOutput
DistillationLoss = Callable[[DistillationRows, Any], DistillationOutput]
"""Computes the loss of B rows, all on one device, with the job's settings."""


def diffusion_opd(rows: DistillationRows, part: DistillationSettings) -> DistillationOutput:
    """DiffusionOPD, https://arxiv.org/abs/2605.15055: KL of each step to the teacher's, on the policy's own states.

    Both steps are Gaussians of one std, so the KL is exact and has no sampling noise: loss = mean((mu - mu_T)^2) /
    (2 std^2), the MEAN over the elements of a sample. A step without noise has no density. There the loss is the
    authors', mean((mu - mu_T)^2) / 2.

    Args:
        rows: uses all.
        part: uses nothing.
    """
    squared = (rows.mean - rows.teacher_mean.detach()).square().flatten(1).mean(dim=1)
    loss = torch.where(rows.std > 0, reference_kl(rows.mean, rows.teacher_mean, rows.std), squared / 2)
    return DistillationOutput(loss, {"actor/teacher_kl": loss.detach().sum()})
