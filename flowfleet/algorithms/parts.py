"""Weights of the parts of a sample, where its latents have several: a film's picture and its sound.

The mean over all elements is the joint log-prob up to a constant. With other weights each part's mean counts as given:
log-probs are joined of the parts', and what losses square is scaled beforehand, so that no loss knows of parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LatentParts:
    """Parts of flat latents, in order: a film's picture and its sound."""

    lengths: tuple[int, ...]
    """Elements of each part; together those of a sample."""
    weights: tuple[float, ...]
    """Share of each part's mean in a sample's; they add up to 1."""

    @classmethod
    def of(cls, lengths: Sequence[int], second: float | None) -> "LatentParts | None":
        """Two parts, or None without lengths. `second` is the second's weight; None is its share of the elements, which
        then count alike."""
        if not lengths:
            return None
        share = lengths[1] / sum(lengths) if second is None else second
        return cls((lengths[0], lengths[1]), (1 - share, share))


def joined(log_probs: Tensor, parts: LatentParts) -> Tensor:
    """(...) from the parts' (..., P); the same bits on every device."""
    first, *others = (weight * one for weight, one in zip(parts.weights, log_probs.unbind(-1), strict=True))
    for other in others:
        first = first + other
    return first


def scaled(values: Tensor, parts: LatentParts | None) -> Tensor:
    """(B, N) whose mean square over a sample is that of the parts by their weights."""
    if parts is None:
        return values
    total = sum(parts.lengths)
    factors = [(weight * total / length) ** 0.5 for weight, length in zip(parts.weights, parts.lengths, strict=True)]
    if all(abs(factor - 1) < 1e-12 for factor in factors):
        return values
    pieces = torch.split(values, list(parts.lengths), dim=-1)
    return torch.cat([factor * piece for factor, piece in zip(factors, pieces, strict=True)], dim=-1)
