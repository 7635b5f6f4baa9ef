"""DGPO and CRD against float64 oracles written from the formulas, and their gradients against central differences."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowfleet.algorithms.builtin.matching import CrdSettings, DgpoSettings
from flowfleet.algorithms.matching.groups import crd, dgpo, group_mean
from flowfleet.algorithms.matching.likelihood import ERRORS
from flowfleet.algorithms.matching.losses import MatchingRows
from tests.flowfleet.algorithms.matching.test_likelihood import error_and_slope
from tests.flowfleet.algorithms.matching.test_losses import SHAPES, Inputs, draw, seen_by
from tests.flowfleet.algorithms.numerics import PRECISIONS, Array, backward, close, gradient, per_row, row_mean

GROUPS = st.lists(st.integers(0, 3), min_size=1, max_size=7)


def grouped(seed: int, groups: list[int], inner: list[int], dtype: torch.dtype, distance: float = 1.0) -> MatchingRows:
    """Rows of those groups, in any order."""
    return replace(draw(seed, len(groups), inner, dtype, distance), groups=torch.tensor(groups))


def means(values: Array, groups: list[int]) -> Array:
    """(B,) the mean of each row's group."""
    number = np.array(groups)
    return np.array([values[number == group].mean() for group in groups])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), groups=GROUPS)
def test_means_are_those_of_the_rows_groups(seed: int, groups: list[int]) -> None:
    batch = grouped(seed, groups, [2], torch.float64)
    close(group_mean(batch.advantages, batch), means(seen_by(batch).advantages, groups), 1e-12)


def dgpo_oracle(inputs: Inputs, groups: list[int], part: DgpoSettings) -> tuple[Array, Array, Array]:
    """Loss (B,), its gradient in the velocity, and S of each row's group."""
    error, slope = error_and_slope("velocity", inputs, inputs.velocity)
    reference, _ = error_and_slope("velocity", inputs, inputs.reference)
    old, _ = error_and_slope("velocity", inputs, inputs.old)
    preference = part.beta * means(inputs.advantages * (error - reference), groups)
    share = 1 / (1 + np.exp(-preference))
    ratio = np.exp(old - error)
    is_cut = np.where(inputs.advantages > 0, ratio > 1 + part.clip_range, ratio < 1 - part.clip_range)
    tie = inputs.velocity - inputs.reference
    loss = share * inputs.advantages * error + part.kl_coef * row_mean(tie**2)
    factor = np.where(is_cut, 0.0, share * inputs.advantages)
    return loss, per_row(factor, slope) * slope + 2 * part.kl_coef * tie / inputs.clean[0].size, preference


@PRECISIONS
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    groups=GROUPS,
    inner=SHAPES,
    beta=st.sampled_from([0.1, 1.0, 10.0]),
    clip=st.sampled_from([0.05, 0.5]),
    kl=st.sampled_from([0.0, 0.3]),
    distance=st.sampled_from([0.05, 0.5]),
)
def test_dgpo_matches_the_formula(
    dtype: torch.dtype,
    tolerance: float,
    seed: int,
    groups: list[int],
    inner: list[int],
    beta: float,
    clip: float,
    kl: float,
    distance: float,
) -> None:
    batch = grouped(seed, groups, inner, dtype, distance)
    part = DgpoSettings(beta=beta, clip_range=clip, kl_coef=kl)
    inputs = seen_by(batch)
    error, old = (error_and_slope("velocity", inputs, velocity)[0] for velocity in (inputs.velocity, inputs.old))
    assume(np.abs((old - error)[:, None] - np.log([1 + clip, 1 - clip])).min() > 1e-4)
    loss, slope, preference = dgpo_oracle(inputs, groups, part)
    assume(np.abs(preference).max() < 20)
    output = dgpo(batch, part)
    backward(output.loss)
    blur = 100 * tolerance * (1 + beta)  # S is beta times a difference of errors
    close(output.loss, loss, blur, floor=1.0)
    close(gradient(batch.velocity), slope, blur, floor=1.0)
    assert output.sums["actor/dgpo_preferred"].item() == (preference < 0).sum()


def test_dgpo_s_gradient_is_that_of_the_group_preference() -> None:
    """-log sigmoid(-S) / beta of a whole group, by central differences, where nothing is clipped."""
    batch = grouped(5, [4] * 4, [3], torch.float64, distance=1e-3)
    part = DgpoSettings(beta=30.0, clip_range=0.9)
    backward(dgpo(batch, part).loss.mean())
    inputs = seen_by(batch)

    def objective(velocity: Array) -> float:
        moved = replace(inputs, velocity=velocity)
        preference = dgpo_oracle(moved, [4] * 4, part)[2][0]
        return float(np.logaddexp(0.0, preference)) / part.beta

    close(gradient(batch.velocity), differences(objective, inputs.velocity), 1e-5)


def differences(objective: Any, velocity: Array) -> Array:
    slope = np.zeros_like(velocity)
    for place in np.ndindex(velocity.shape):
        step = np.zeros_like(velocity)
        step[place] = 1e-5
        slope[place] = (objective(velocity + step) - objective(velocity - step)) / 2e-5
    return slope


@PRECISIONS
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    groups=GROUPS,
    inner=SHAPES,
    kind=st.sampled_from(sorted(ERRORS)),
    beta=st.sampled_from([0.5, 2.0]),
    kl=st.sampled_from([0.0, 0.3]),
    clamp=st.sampled_from([None, 2.0]),
)
def test_crd_matches_the_formula(
    dtype: torch.dtype,
    tolerance: float,
    seed: int,
    groups: list[int],
    inner: list[int],
    kind: Any,
    beta: float,
    kl: float,
    clamp: float | None,
) -> None:
    batch = grouped(seed, groups, inner, dtype)
    part = CrdSettings(likelihood=kind, beta=beta, kl_coef=kl, advantage_clamp=clamp)
    inputs, limit = seen_by(batch), clamp or 5.0
    error, slope = error_and_slope(kind, inputs, inputs.velocity)
    own = error_and_slope(kind, inputs, inputs.old)[0] - error
    share = np.clip(inputs.advantages, -limit, limit) / (2 * limit) + 0.5
    gap = beta * (own - means(own, groups)) - (share - means(share, groups))
    weight = 1e-4 + share * (kl - 1e-4) if kl else np.zeros_like(share)
    tie = inputs.velocity - inputs.reference
    output = crd(batch, part)
    backward(output.loss)
    floor = float(1 + np.abs(gap).max() ** 2) * limit
    close(output.loss, limit / beta * gap**2 + weight * row_mean(tie**2), 100 * tolerance, floor=floor)
    wanted = per_row(-2 * limit * gap, slope) * slope + 2 * per_row(weight, tie) * tie / inputs.clean[0].size
    close(gradient(batch.velocity), wanted, 100 * tolerance, floor=floor)


def test_crd_does_not_see_a_constant_of_the_prompt() -> None:
    """Adding the same number to all advantages of a group changes nothing: the normalizer of the prompt cancels."""
    groups = [0, 0, 0, 1, 1]
    batch = grouped(7, groups, [4], torch.float64)
    batch.advantages.copy_(torch.tensor([1.0, -1.0, 0.5, 0.3, -0.2]))
    shifted = replace(batch, advantages=batch.advantages + torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0]))
    part = CrdSettings(kl_coef=0.0)
    torch.testing.assert_close(crd(shifted, part).loss, crd(batch, part).loss)


@pytest.mark.parametrize(
    ("loss", "part"), [(dgpo, DgpoSettings(kl_coef=0.1, clip_range=0.9)), (crd, CrdSettings(kl_coef=0.1))]
)
def test_only_the_current_velocity_has_a_gradient(loss: Any, part: Any) -> None:
    batch = grouped(4, [0, 0, 1], [3], torch.float64)
    constants = [batch.advantages, batch.old_velocity, batch.reference_velocity]
    for tensor in constants:
        assert tensor is not None
        tensor.requires_grad_()
    backward(loss(batch, part).loss)
    assert gradient(batch.velocity).abs().max() > 0
    assert all(tensor is not None and tensor.grad is None for tensor in constants)
