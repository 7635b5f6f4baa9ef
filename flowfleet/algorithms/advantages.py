"""From rewards to advantages: how much better a sample is than its group. NumPy only: the controller has no torch.

Every std is the population's (ddof 0) unless asked otherwise. A group without a difference, singletons included, gives
exactly 0 throughout.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

AdvantageStd = Literal["global", "group", "none"]
"""Divisor of the centered rewards: the std of the batch, that of the group, or nothing."""

RewardCombination = Literal["sum", "normalized", "separate"]
"""How several rewards become one advantage: see `combined_advantages`."""


@dataclass(frozen=True, slots=True)
class AdvantageStats:
    """Statistics of a step's rewards; the names are those of `critic/rewards/*` and `critic/advantages/*`."""

    reward_mean: float
    reward_max: float
    reward_min: float
    std_mean: float
    """Mean over the groups of the std of a group's rewards."""
    zero_std_ratio: float
    """Share of the groups whose rewards are all equal, singletons included: they teach nothing."""
    group_size: float
    """Mean number of samples in a group."""
    num_groups: int
    advantage_mean: float
    advantage_max: float
    advantage_min: float


def group_advantages(
    rewards: ArrayLike,
    group_ids: Sequence[Hashable],
    *,
    std: AdvantageStd = "global",
    eps: float = 1e-4,
    clamp: float | None = 5.0,
    ddof: int = 0,
) -> tuple[NDArray[np.float64], AdvantageStats]:
    """Group-relative advantages, A = (r - mean of the group) / (std + eps), as in Flow-GRPO.

    Args:
        rewards: (N,) finite numbers.
        group_ids: N ids; samples of equal id form a group, in any order.
        std: `global` divides by the std of all N rewards, `group` by that of the sample's group, `none` does not.
        eps: added to the std; not used by `none`.
        clamp: advantages are cut to [-clamp, clamp]; None leaves them.
        ddof: delta degrees of freedom of every std here, 0 as in flow_grpo: the population std.

    Returns:
        Advantages (N,) float64 in the order of `rewards`, and the step's statistics. A sample whose group is a
        singleton, or has equal rewards throughout, gets exactly 0.

    Raises:
        ValueError: no rewards, lengths that differ, or a reward that is not finite (its index is named).
    """
    values = _checked(rewards, group_ids)
    groups = group_indices(group_ids)
    batch_scale = _std(values, ddof) + eps
    advantages = np.zeros_like(values)
    for indices in groups:
        group = values[indices]
        if np.ptp(group) > 0:
            scale = {"global": batch_scale, "group": _std(group, ddof) + eps, "none": 1.0}[std]
            advantages[indices] = (group - group.mean()) / scale
    advantages = _clamped(advantages, clamp)
    return advantages, _stats(values, advantages, groups, ddof)


def combined_advantages(
    rewards: Mapping[str, ArrayLike],
    weights: Mapping[str, ArrayLike],
    group_ids: Sequence[Hashable],
    *,
    combination: RewardCombination = "sum",
    std: AdvantageStd = "global",
    eps: float = 1e-4,
    clamp: float | None = 5.0,
    ddof: int = 0,
    present: Mapping[str, ArrayLike] | None = None,
) -> tuple[NDArray[np.float64], AdvantageStats]:
    """Group-relative advantages of several rewards.

    - `sum`: `group_advantages` of r = sum of weight * reward.
    - `normalized`: as GDPO (https://arxiv.org/abs/2601.05242), so that no reward drowns in another's spread. Each
      reward gives (r - mean of the group) / (std of the group + eps); their weighted sum is divided by its std over the
      batch + eps. (Centring it over the batch too would change nothing: every group's sum is 0.) `std` is not used.
    - `separate`: the weighted sum of each reward's own `group_advantages`, not clamped before, not normalized again
      (MixGRPO, https://arxiv.org/abs/2507.21802, with `std = "group"`). Of one reward it is `sum` times its weight.

    Args:
        rewards: name to (N,) finite numbers.
        weights: of the same names, of any sign: one, or (N,) one a sample, equal inside a group.
        group_ids, std, eps, clamp, ddof: as in `group_advantages`; the clamp is last.
        present: name to (N,) bool; the numbers in `rewards` of samples that have no such reward count nowhere. For
            `sum` they get what prefers no sample (`weighted_total`); for `normalized` and `separate` they are left out
            of its means and stds, and their part is 0. None: all have all.

    Returns:
        Advantages (N,) float64, and statistics of the weighted sum of the rewards, whatever the combination.

    Raises:
        ValueError: other names in `weights` than in `rewards`, none at all, or rewards that `group_advantages` refuses.
    """
    if set(rewards) != set(weights) or not weights:
        raise ValueError(
            f"need one weight a reward, but got rewards {', '.join(rewards) or 'none'} and weights "
            f"{', '.join(weights) or 'none'}"
        )
    columns = {name: _checked(values, group_ids, f"{name} reward") for name, values in rewards.items()}
    total = weighted_total(columns, weights, group_ids, present)
    if combination == "sum":
        return group_advantages(total, group_ids, std=std, eps=eps, clamp=clamp, ddof=ddof)
    own_std: AdvantageStd = "group" if combination == "normalized" else std
    advantages = np.zeros(len(group_ids))
    for name in sorted(columns):
        rows = np.arange(len(group_ids)) if present is None else np.flatnonzero(present[name])
        if rows.size:
            ids = [group_ids[row] for row in rows.tolist()]
            own, _ = group_advantages(columns[name][rows], ids, std=own_std, eps=eps, clamp=None, ddof=ddof)
            advantages[rows] += np.broadcast_to(weights[name], len(group_ids))[rows] * own
    if combination == "normalized":
        advantages /= _std(advantages, ddof) + eps
    advantages = _clamped(advantages, clamp)
    return advantages, _stats(_checked(total, group_ids), advantages, group_indices(group_ids), ddof)


def shaped_by_diversity(
    advantages: ArrayLike, diversity: ArrayLike, group_ids: Sequence[Hashable], *, clamp: float | None = None
) -> NDArray[np.float64]:
    """GARDO's advantages (https://arxiv.org/abs/2512.24138): those above 0 times the sample's diversity.

    Diversity is divided by its mean over the group, as in the authors' code, so its scale does not matter. The paper's
    equation 8 leaves that out. A group without any, and samples whose diversity is NaN, keep their advantages.

    Args:
        advantages: (N,).
        diversity: (N,) at least 0; NaN where a sample has none.
        group_ids: N ids, as in `group_advantages`.
        clamp: as there; it is last.
    """
    values, scores = np.asarray(advantages, dtype=np.float64).copy(), np.asarray(diversity, dtype=np.float64)
    for rows in group_indices(group_ids):
        known = rows[np.isfinite(scores[rows])]
        if known.size and (mean := scores[known].mean()) > 0:
            better = known[values[known] > 0]
            values[better] *= scores[better] / mean
    return _clamped(values, clamp)


def uncertain(total: ArrayLike, auxiliary: Sequence[ArrayLike], share: float) -> NDArray[np.bool_]:
    """The samples whose reward other rewards trust least, of GARDO (https://arxiv.org/abs/2512.24138).

    A sample's uncertainty is its win rate by `total` less the mean of its win rates by the auxiliary rewards. A win
    rate is the share of the batch that a sample beats. Of the uncertainties that are not negative, those from the
    (1 - share) quantile on are taken, but none of 0. The authors' code leaves out the quantile itself, so that of
    equals at the top none is left, and ranks from the greatest reward on, which turns the sign round.

    Args:
        total: (N,) what is trained on.
        auxiliary: at least one, (N,) each. A sample without a score (NaN) beats none.
        share: from 0 to 1.
    """
    doubt = _win_rates(total) - np.mean([_win_rates(values) for values in auxiliary], axis=0)
    least = np.quantile(doubt[doubt >= 0], 1 - share)
    found: NDArray[np.bool_] = (doubt >= least) & (doubt > 0)
    return found


def _win_rates(values: ArrayLike) -> NDArray[np.float64]:
    """(N,) the share of all N that each beats."""
    scores = np.asarray(values, dtype=np.float64)
    known = np.sort(scores[np.isfinite(scores)])
    wins = np.where(np.isfinite(scores), np.searchsorted(known, np.nan_to_num(scores), side="left"), 0)
    rates: NDArray[np.float64] = wins / len(scores)
    return rates


def weighted_total(
    rewards: Mapping[str, ArrayLike],
    weights: Mapping[str, ArrayLike],
    group_ids: Sequence[Hashable],
    present: Mapping[str, ArrayLike] | None = None,
) -> NDArray[np.float64]:
    """(N,) sums of weight * reward, comparable with each other.

    Where a sample has no such reward, the mean of those that its group has takes the place of weight * reward, else the
    mean of all samples that have it, else 0. So a reward moves neither the order nor the spread of samples that it does
    not score.
    """
    total = np.zeros(len(group_ids))
    for name in sorted(rewards):
        part = np.asarray(weights[name], dtype=np.float64) * np.asarray(rewards[name], dtype=np.float64)
        total += part if present is None else _neutral(part, np.asarray(present[name], dtype=np.bool_), group_ids)
    return total


def _neutral(
    column: NDArray[np.float64], present: NDArray[np.bool_], group_ids: Sequence[Hashable]
) -> NDArray[np.float64]:
    if present.all():
        return column
    if not present.any():
        return np.zeros_like(column)
    filled = np.where(present, column, column[present].mean())
    for rows in group_indices(group_ids):
        if present[rows].any():
            filled[rows[~present[rows]]] = column[rows[present[rows]]].mean()
    return filled


def _clamped(advantages: NDArray[np.float64], clamp: float | None) -> NDArray[np.float64]:
    return advantages if clamp is None else np.clip(advantages, -clamp, clamp)


def _checked(rewards: ArrayLike, group_ids: Sequence[Hashable], what: str = "reward") -> NDArray[np.float64]:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or len(values) != len(group_ids):
        raise ValueError(
            f"need one reward and one group id a sample, but got rewards {values.shape} and {len(group_ids)} ids"
        )
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(
            f"{what} {index} (group {group_ids[index]!r}) is {values[index]}: drop the sample before this point"
        )
    return values


def group_indices(group_ids: Sequence[Hashable]) -> list[NDArray[np.intp]]:
    """Places of each group's samples, by the groups' first ones."""
    members: dict[Hashable, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(index)
    return [np.array(indices, dtype=np.intp) for indices in members.values()]


def _std(values: NDArray[np.float64], ddof: int) -> float:
    """0 where it is not defined (`ddof` values or fewer) and where all values are equal, which rounding would blur."""
    return float(values.std(ddof=ddof)) if len(values) > ddof and np.ptp(values) > 0 else 0.0


def _stats(
    rewards: NDArray[np.float64], advantages: NDArray[np.float64], groups: list[NDArray[np.intp]], ddof: int
) -> AdvantageStats:
    stds = np.array([_std(rewards[indices], ddof) for indices in groups])
    return AdvantageStats(
        reward_mean=float(rewards.mean()),
        reward_max=float(rewards.max()),
        reward_min=float(rewards.min()),
        std_mean=float(stds.mean()),
        zero_std_ratio=float((stds == 0).mean()),
        group_size=len(rewards) / len(groups),
        num_groups=len(groups),
        advantage_mean=float(advantages.mean()),
        advantage_max=float(advantages.max()),
        advantage_min=float(advantages.min()),
    )
