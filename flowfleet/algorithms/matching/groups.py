"""Matching losses that compare the samples of a group: a micro-batch holds whole groups (`Loss.needs_groups`)."""

import torch
from torch import Tensor

from flowfleet.algorithms.builtin.matching import CrdSettings, DgpoSettings
from flowfleet.algorithms.losses import Limits, beyond, ratio_stats
from flowfleet.algorithms.matching.likelihood import log_likelihood_ratio
from flowfleet.algorithms.matching.losses import (
    DEFAULT_CLAMP,
    MatchingOutput,
    MatchingRows,
    mean_square,
    target_velocity,
    with_reference,
)

LEAST_KL = 1e-4
"""Weight of CRD's KL at the least reward, as in its authors' code."""


def dgpo(rows: MatchingRows, part: DgpoSettings) -> MatchingOutput:
    """DGPO, https://arxiv.org/abs/2510.08425: prefers the better samples of a group to the worse ones.

    With e = mean((velocity - (noise - clean))^2) of the current policy, e_ref and e_old of the other two, and a group's
    S = beta mean(A (e - e_ref)), which is a constant: loss = sigmoid(S) A e + kl_coef mean((f - reference)^2). The
    error has no gradient in rows whose exp(e_old - e) is above 1 + c with A > 0, or below 1 - c_low otherwise.

    The gradient is that of -log sigmoid(-S), divided by beta. e - e_ref is computed as in `dpo`.

    Args:
        rows: uses all. The samples of a group have one noise and one sigma, so that what they share cancels.
        part: uses `beta`, `clip_range`, `clip_range_low` and `kl_coef`.
    """
    assert rows.reference_velocity is not None
    assert rows.old_velocity is not None
    target = target_velocity(rows)
    current, reference = rows.velocity.to(target), rows.reference_velocity.detach().to(target)
    error = mean_square(current - target)
    log_ratio = mean_square(rows.old_velocity.detach().to(target) - target) - error
    limits = Limits(part.clip_range, clip_range_low=part.clip_range_low)
    advantages = rows.advantages.detach().to(target)
    higher, lower = beyond(log_ratio, limits)
    higher, lower = higher & (advantages > 0), lower & (advantages <= 0)
    excess = ((current - reference) * (current + reference - 2 * target)).detach().flatten(1).mean(dim=1)
    preference = part.beta * group_mean(advantages * excess, rows)
    kept = torch.where(higher | lower, error.detach(), error)
    loss, sums = with_reference(preference.sigmoid() * advantages * kept, rows, part.kl_coef)
    sums = sums | {"actor/dgpo_preferred": (preference < 0).to(target).sum()}
    return MatchingOutput(loss, sums, ratio_stats(log_ratio, higher, lower))


def crd(rows: MatchingRows, part: CrdSettings) -> MatchingOutput:
    """CRD, https://arxiv.org/abs/2603.14128: the model's own reward follows the given one, both centered in a group.

    With e the error that `likelihood` names, r = e_old - e_current is the model's own reward up to a constant of the
    prompt. With p = clip(A, -a, a) / (2a) + 1/2, and group means m of which that of r is a constant:
    loss = a / beta (beta (r - m(r)) - (p - m(p)))^2 + k mean((f - reference)^2), k = 1e-4 + p (kl_coef - 1e-4), or
    0 where kl_coef is.

    Args:
        rows: uses all; `reference_velocity` only with `kl_coef` above 0.
        part: uses `likelihood`, `beta`, `kl_coef` and `advantage_clamp`, which is a (5 if it is null).
    """
    log_prob, own = log_likelihood_ratio(rows, part)
    clamp = DEFAULT_CLAMP if part.advantage_clamp is None else part.advantage_clamp
    share = rows.advantages.detach().to(log_prob).clamp(-clamp, clamp) / (2 * clamp) + 0.5
    gap = part.beta * (own - group_mean(own.detach(), rows)) - (share - group_mean(share, rows))
    weight = LEAST_KL + share * (part.kl_coef - LEAST_KL) if part.kl_coef else 0.0
    loss, sums = with_reference(clamp / part.beta * gap.square(), rows, weight)
    nowhere = own.detach().isnan()  # no ratio is limited
    return MatchingOutput(loss, sums, ratio_stats(own, nowhere, nowhere))


def group_mean(values: Tensor, rows: MatchingRows) -> Tensor:
    """(B,) the mean of each row's group."""
    assert rows.groups is not None
    _, place = torch.unique(rows.groups.to(values.device), return_inverse=True)
    sums = values.new_zeros(int(place.max()) + 1).index_add(0, place, values)
    return (sums / torch.bincount(place).to(values))[place]
