"""Pairs of a better and a worse sample of one group, for losses that learn from preferences. NumPy only."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flowfleet.algorithms.advantages import group_indices


@dataclass(frozen=True, slots=True)
class Pair:
    """Two samples of one group, by their index in the list that the pair was made from."""

    winner: int
    loser: int
    number: int
    """Number of the pair inside its group, from 0: the wider the gap, the lower."""


def make_pairs(rewards: ArrayLike, group_ids: Sequence[Hashable], pairs_per_group: int = 1) -> list[Pair]:
    """Best and worst of every group, then second best and second worst, and so on.

    A pair without a difference in reward is left out, as it prefers nothing: so a group of equal rewards, or of one
    sample, gives none, and one of few samples fewer than asked for. Equal rewards rank by position, the earlier first,
    so the same input gives the same pairs.

    Args:
        rewards: (N,) finite numbers.
        group_ids: N ids; samples of equal id form a group, in any order.
        pairs_per_group: at most so many of a group, at least 1.

    Returns:
        Pairs by group, in the order of the groups' first samples, then by number. No sample is in two.

    Raises:
        ValueError: lengths that differ, a reward that is not finite, or pairs_per_group below 1.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or len(values) != len(group_ids) or not np.isfinite(values).all():
        raise ValueError(
            f"need one finite reward and one group id a sample, but got rewards {values.shape} and {len(group_ids)} ids"
        )
    if pairs_per_group < 1:
        raise ValueError(f"pairs_per_group must be at least 1, but it is {pairs_per_group}")
    groups = group_indices(group_ids)
    return [pair for group in groups for pair in _pairs_of(values.tolist(), group.tolist(), pairs_per_group)]


def _pairs_of(rewards: Sequence[float], group: Sequence[int], limit: int) -> list[Pair]:
    ranked = sorted(group, key=lambda index: -rewards[index])  # stable: ties keep their order
    count = min(limit, len(ranked) // 2)
    candidates = (Pair(ranked[number], ranked[-1 - number], number) for number in range(count))
    return [pair for pair in candidates if rewards[pair.winner] > rewards[pair.loser]]
