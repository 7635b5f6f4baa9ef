"""AWM and the ELBO policy gradient against float64 oracles written from the formulas."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.algorithms.builtin.matching import AwmSettings, ElboPgSettings
from flowfleet.algorithms.losses import Limits
from flowfleet.algorithms.matching.likelihood import ERRORS, awm, elbo_pg
from flowfleet.algorithms.matching.losses import MatchingRows
from tests.flowfleet.algorithms.matching.test_losses import SHAPES, Inputs, draw, seen_by
from tests.flowfleet.algorithms.numerics import PRECISIONS, Array, backward, close, gradient, per_row, row_mean

KINDS = st.sampled_from(sorted(ERRORS))


def error_and_slope(kind: str, inputs: Inputs, velocity: Array) -> tuple[Array, Array]:
    """An error (B,) and its gradient in the velocity, by the formulas of the papers."""
    sigma, size = per_row(inputs.sigma, inputs.clean), inputs.clean[0].size
    x_sigma = (1 - sigma) * inputs.clean + sigma * inputs.noise
    if kind in ("x0", "normalized_x0"):
        residual, inner = x_sigma - sigma * velocity - inputs.clean, -sigma
    else:
        residual, inner = velocity - (inputs.noise - inputs.clean), np.ones_like(sigma)
    square, slope = row_mean(residual**2), 2 * residual * inner / size
    if kind.startswith("normalized"):
        weight = np.maximum(row_mean(np.abs(residual)), 1e-5)
        return square / weight, slope / per_row(weight, slope)
    if kind == "huber":
        factor = inputs.sigma * (square + 1e-10) ** (0.25 - 1)  # the power's derivative over the power
        error = inputs.sigma * ((square + 1e-10) ** 0.25 - 1e-10**0.25) / 0.25
        return error, slope * per_row(factor, slope)
    return square, slope


def awm_oracle(inputs: Inputs, part: AwmSettings) -> tuple[Array, Array, Array]:
    """Loss (B,), its gradient in the velocity, and the ratio."""
    error, slope = error_and_slope(part.likelihood, inputs, inputs.velocity)
    old, _ = error_and_slope(part.likelihood, inputs, inputs.old)
    clamp = part.advantage_clamp or 5.0
    ratio, advantages = np.exp(old - error), np.clip(inputs.advantages, -clamp, clamp) / clamp
    cut = np.clip(ratio, 1 - (part.clip_range_low or part.clip_range), 1 + part.clip_range)
    plain, limited = -advantages * ratio, -advantages * cut
    distance, tie = inputs.velocity - inputs.old, inputs.velocity - inputs.reference
    loss = np.maximum(plain, limited)
    loss = loss + row_mean(distance**2) + part.kl_coef * row_mean(tie**2)
    factor = np.where(plain >= limited, advantages * ratio, 0.0)
    total = per_row(factor, slope) * slope
    total += 2 * (distance + part.kl_coef * tie) / inputs.clean[0].size
    return loss, total, ratio


@PRECISIONS
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    inner=SHAPES,
    kind=KINDS,
    clip=st.sampled_from([0.1, 0.5, 1.0]),
    low=st.sampled_from([None, 0.3]),
    clamp=st.sampled_from([None, 2.0]),
    kl=st.sampled_from([0.0, 0.3]),
)
def test_awm_matches_the_formula(
    dtype: torch.dtype,
    tolerance: float,
    seed: int,
    rows: int,
    inner: list[int],
    kind: Any,
    clip: float,
    low: float | None,
    clamp: float | None,
    kl: float,
) -> None:
    part = AwmSettings(likelihood=kind, clip_range=clip, clip_range_low=low, advantage_clamp=clamp, kl_coef=kl)
    batch = draw(seed, rows, inner, dtype)
    loss, slope, ratio = awm_oracle(seen_by(batch), part)
    output = awm(batch, part)
    backward(output.loss)
    close(output.loss, loss, 10 * tolerance, floor=max(1.0, float(ratio.max())))
    edges = np.abs(np.log(ratio)[:, None] - np.log([1 + clip, max(1e-300, 1 - (low or clip))])).min()
    if edges > 1e-4:  # rounding decides nothing
        close(gradient(batch.velocity), slope, 10 * tolerance, floor=max(1.0, float(ratio.max())))
    assert output.ratios is not None
    assert output.ratios.metrics()["actor/ratio_mean"] == pytest.approx(ratio.mean(), rel=1e-4)
    assert not any(value.requires_grad for value in output.sums.values())


@PRECISIONS
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    inner=SHAPES,
    kind=KINDS,
    beta=st.sampled_from([0.5, 10.0]),
    kl=st.sampled_from([0.0, 0.3]),
    proximal=st.booleans(),
)
def test_elbo_pg_matches_the_formula(
    dtype: torch.dtype,
    tolerance: float,
    seed: int,
    rows: int,
    inner: list[int],
    kind: Any,
    beta: float,
    kl: float,
    proximal: bool,
) -> None:
    part = ElboPgSettings(likelihood=kind, beta=beta, kl_coef=kl, proximal=proximal)
    batch = draw(seed, rows, inner, dtype)
    inputs = seen_by(batch)
    error, slope = error_and_slope(kind, inputs, inputs.velocity)
    log_ratio = error_and_slope(kind, inputs, inputs.old)[0] - error
    factor = np.exp(log_ratio) * (inputs.advantages / beta - (log_ratio if proximal else 0.0))
    tie = inputs.velocity - inputs.reference
    output = elbo_pg(batch, part)
    backward(output.loss)
    floor = float(np.abs(factor).max() * (1 + error.max()))
    close(output.loss, factor * error + kl * row_mean(tie**2), 10 * tolerance, floor=floor)
    wanted = per_row(factor, slope) * slope + 2 * kl * tie / inputs.clean[0].size
    close(gradient(batch.velocity), wanted, 10 * tolerance, floor=floor)
    assert output.ratios is not None
    assert output.ratios.metrics()["actor/ratio_mean"] == pytest.approx(np.exp(log_ratio).mean(), rel=1e-4)


@pytest.mark.parametrize("kind", sorted(ERRORS))
def test_on_policy_both_gradients_are_the_advantages_times_the_matching_gradient(kind: Any) -> None:
    """At f = o the ratio is 1 and nothing is clipped: A / a, or A / beta, times the gradient of the error."""
    cases: tuple[tuple[Any, float, Any], ...] = (
        (awm, 5.0, AwmSettings(likelihood=kind, clip_range=0.01)),
        (elbo_pg, 8.0, ElboPgSettings(likelihood=kind, beta=8.0)),
    )
    for loss, scale, part in cases:
        batch = draw(1, 3, [7], torch.float64, distance=0.0)
        batch.advantages.copy_(torch.tensor([5.0, 0.0, -2.5]))
        backward(loss(batch, part).loss)
        inputs = seen_by(batch)
        _, slope = error_and_slope(kind, inputs, inputs.velocity)
        close(gradient(batch.velocity), np.array([[5.0], [0.0], [-2.5]]) / scale * slope, 1e-10)


def test_pepg_rests_where_the_log_ratio_is_the_advantage() -> None:
    batch = draw(2, 4, [6], torch.float64)
    part = ElboPgSettings(likelihood="x0", beta=0.25)
    inputs = seen_by(batch)
    log_ratio = error_and_slope("x0", inputs, inputs.old)[0] - error_and_slope("x0", inputs, inputs.velocity)[0]
    batch.advantages.copy_(torch.from_numpy(0.25 * log_ratio))
    output = elbo_pg(batch, part)
    backward(output.loss)
    assert gradient(batch.velocity).abs().max() < 1e-12
    assert not torch.allclose(elbo_pg(batch, part.model_copy(update={"proximal": False})).loss, output.loss)


def test_a_clip_range_of_one_cuts_only_above() -> None:
    limits = Limits(1.0, 1e-5)
    assert limits.log_low == -np.inf
    assert limits.log_high == pytest.approx(np.log(2))


@pytest.mark.parametrize("kind", sorted(ERRORS))
@pytest.mark.parametrize(("loss", "model"), [(awm, AwmSettings), (elbo_pg, ElboPgSettings)])
def test_a_perfect_prediction_is_finite(loss: Any, model: Any, kind: Any) -> None:
    batch = draw(2, 2, [4], torch.float32)
    right = batch.noise - batch.clean
    fields = {name: getattr(batch, name) for name in MatchingRows.__slots__}
    exact = MatchingRows(**fields | {"velocity": right.clone().requires_grad_(), "old_velocity": right})
    backward(loss(exact, model(likelihood=kind)).loss)
    assert gradient(exact.velocity).abs().max() == 0
