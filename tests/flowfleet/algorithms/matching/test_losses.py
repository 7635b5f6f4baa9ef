"""Matching losses and the old policy's schedule against float64 oracles written from the formulas."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flowfleet.algorithms.builtin.matching import DiffusionNftSettings
from flowfleet.algorithms.builtin.pairs import DpoSettings
from flowfleet.algorithms.matching.losses import MatchingRows, diffusion_nft, dpo, noisy, old_policy_decay
from flowfleet.algorithms.settings import OldPolicyPart
from tests.flowfleet.algorithms.numerics import (
    PRECISIONS,
    Array,
    as_float64,
    backward,
    close,
    gradient,
    per_row,
    row_mean,
)

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@dataclass(frozen=True)
class Inputs:
    """Float64 values of a batch, as the oracles read them."""

    clean: Array
    noise: Array
    sigma: Array
    velocity: Array
    advantages: Array
    old: Array
    reference: Array

    @property
    def target(self) -> Array:
        return self.noise - self.clean


def draw(seed: int, rows: int, inner: list[int], dtype: torch.dtype, distance: float = 1.0) -> MatchingRows:
    """The three policies are `distance` apart, around the right velocity and its typical error."""
    rng = np.random.default_rng(seed)

    def cast(values: Array) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    shape = (rows, *inner)
    clean, noise, base = (rng.normal(size=shape) for _ in range(3))
    velocities = [cast(noise - clean + base + distance * rng.normal(size=shape)) for _ in range(3)]
    return MatchingRows(
        cast(clean),
        cast(noise),
        cast(rng.uniform(0.02, 0.98, rows)),
        velocities[0].requires_grad_(),
        cast(rng.normal(0, 4, rows)),
        velocities[1],
        velocities[2],
    )


def seen_by(rows: MatchingRows) -> Inputs:
    fields = (getattr(rows, name) for name in MatchingRows.__slots__ if name not in ("ties", "groups"))
    return Inputs(*(as_float64(field) for field in fields))


def nft_error(inputs: Inputs, beta: float) -> Array:
    """Error of the x0 predicted by the mixture of new and old policy."""
    sigma = per_row(inputs.sigma, inputs.clean)
    x_sigma = (1 - sigma) * inputs.clean + sigma * inputs.noise
    return x_sigma - sigma * ((1 - beta) * inputs.old + beta * inputs.velocity) - inputs.clean


def nft_oracle(inputs: Inputs, part: DiffusionNftSettings) -> tuple[Array, Array, dict[str, float]]:
    """Loss (B,), its gradient in the velocity, and the sums of the metrics, by x0 predictions."""
    sigma, clamp, beta = per_row(inputs.sigma, inputs.clean), part.advantage_clamp or 5.0, part.beta
    advantages = {
        "all": inputs.advantages,
        "positive": np.maximum(inputs.advantages, 0),
        "negative": np.minimum(inputs.advantages, 0),
        "sign": np.sign(inputs.advantages),
        "positive_sign": np.where(inputs.advantages > 0, 1.0, 0.0),
    }[part.advantage_mode]
    share = np.clip(advantages, -clamp, clamp) / (2 * clamp) + 0.5
    size = inputs.clean[0].size
    losses, slopes = [], []
    for sign in (1, -1):
        error = nft_error(inputs, sign * beta)
        weight = np.maximum(row_mean(np.abs(error)), 1e-5)
        losses.append(row_mean(error**2) / weight)
        slopes.append(2 * error * -sigma * sign * beta / size / per_row(weight, error))
    distance = inputs.velocity - inputs.reference
    loss = clamp * (share * losses[0] + (1 - share) * losses[1]) / beta + part.kl_coef * row_mean(distance**2)
    share = per_row(share, distance)
    slope = clamp * (share * slopes[0] + (1 - share) * slopes[1]) / beta + part.kl_coef * 2 * distance / size
    deviation = row_mean((inputs.velocity - inputs.old) ** 2)
    sums = {"nft_positive_loss": losses[0], "nft_negative_loss": losses[1], "old_deviation": deviation}
    if part.kl_coef:
        sums["kl_loss"] = row_mean(distance**2)
    return loss, slope, {f"actor/{name}": float(values.sum()) for name, values in sums.items()}


@PRECISIONS
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    inner=SHAPES,
    beta=st.sampled_from([0.1, 0.5, 1.0]),
    kl_coef=st.sampled_from([0.0, 0.3]),
    clamp=st.sampled_from([None, 0.5, 2.0, 5.0]),
    mode=st.sampled_from(["all", "positive", "negative", "sign", "positive_sign"]),
)
def test_diffusion_nft_matches_the_formula(
    dtype: torch.dtype,
    tolerance: float,
    seed: int,
    rows: int,
    inner: list[int],
    beta: float,
    kl_coef: float,
    clamp: float | None,
    mode: Any,
) -> None:
    part = DiffusionNftSettings(beta=beta, kl_coef=kl_coef, advantage_clamp=clamp, advantage_mode=mode)
    batch = draw(seed, rows, inner, dtype)
    # Of few elements a sample may be predicted almost exactly, which leaves float32 with the rounding of its terms.
    errors = [row_mean(np.abs(nft_error(seen_by(batch), sign * beta))).min() for sign in (1, -1)]
    assume(dtype == torch.float64 or min(errors) > 0.05)
    output = diffusion_nft(batch, part)
    backward(output.loss)
    loss, slope, sums = nft_oracle(seen_by(batch), part)
    terms = clamp or 5.0  # as large as what cancels, wholly where the share is one half
    close(output.loss, loss, tolerance, floor=0.1 * terms / beta)
    close(gradient(batch.velocity), slope, tolerance, floor=terms)
    values = {name: value.item() for name, value in output.sums.items()}
    assert values == pytest.approx(sums, rel=10 * tolerance, abs=0.1 * tolerance)
    assert not any(value.requires_grad for value in output.sums.values())


def test_on_policy_nft_pulls_towards_good_samples_and_pushes_from_bad_ones() -> None:
    """Both losses are equal if f = old, and the gradient is A / clamp times that of the plain matching loss."""
    batch = draw(1, 3, [7], torch.float64, distance=0.0)
    batch.advantages.copy_(torch.tensor([5.0, 0.0, -2.5]))
    output = diffusion_nft(batch, DiffusionNftSettings(beta=0.2))
    backward(output.loss)
    inputs = seen_by(batch)
    sigma = inputs.sigma[:, None]
    error = sigma * (inputs.target - inputs.velocity)
    plain = -2 * sigma * error / 7 / row_mean(np.abs(error))[:, None]
    close(gradient(batch.velocity), np.array([[5.0], [0.0], [-2.5]]) * plain, 1e-10)
    assert output.sums["actor/old_deviation"].item() == 0


def test_nft_of_a_perfect_prediction_is_finite() -> None:
    batch = draw(2, 2, [4], torch.float32)
    exact = MatchingRows(
        batch.clean,
        batch.noise,
        batch.sigma,
        (batch.noise - batch.clean).requires_grad_(),
        batch.advantages,
        batch.noise - batch.clean,
    )
    output = diffusion_nft(exact, DiffusionNftSettings())
    backward(output.loss)
    assert output.loss.tolist() == [0.0, 0.0]
    assert gradient(exact.velocity).abs().max() == 0


def dpo_oracle(inputs: Inputs, beta: float) -> tuple[Array, Array, Array]:
    """Loss (B,), gradient of its sum in the velocity, and z of each pair."""
    excess = row_mean((inputs.velocity - inputs.target) ** 2) - row_mean((inputs.reference - inputs.target) ** 2)
    margin = -0.5 * beta * (excess[0::2] - excess[1::2])
    loss = np.logaddexp(0.0, -margin)
    slope = np.exp(-np.logaddexp(0.0, margin)) * 0.5 * beta  # of the pair's loss in the winner's excess
    slope = 2 * np.stack([slope, -slope], axis=1).reshape(-1)  # the loss stands on both rows
    error = inputs.velocity - inputs.target
    return np.repeat(loss, 2), per_row(slope, error) * 2 * error / error[0].size, margin


@PRECISIONS
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    pairs=st.integers(1, 4),
    inner=SHAPES,
    beta=st.sampled_from([0.1, 100.0, 2000.0]),
    distance=st.sampled_from([1e-3, 0.05, 1.0]),
)
def test_dpo_matches_the_formula(
    dtype: torch.dtype, tolerance: float, seed: int, pairs: int, inner: list[int], beta: float, distance: float
) -> None:
    batch = draw(seed, 2 * pairs, inner, dtype, distance)
    output = dpo(batch, DpoSettings(beta=beta))
    backward(output.loss)
    loss, slope, margin = dpo_oracle(seen_by(batch), beta)
    # In float32 z is rounded relative to beta times a row's excess, which may be larger than their difference.
    blur = 0.0 if dtype == torch.float64 else 1e-6 * beta * distance
    underflow = 1e-25 if dtype == torch.float32 else 1e-250  # of a saturated sigmoid
    close(output.loss, loss, tolerance, floor=max(underflow, blur / tolerance))
    close(gradient(batch.velocity), slope, tolerance + blur, floor=underflow)
    assert output.sums["actor/dpo_margin"].item() == pytest.approx(2 * margin.sum(), rel=1e-4, abs=1e-9 + pairs * blur)
    if np.abs(margin).min() > blur:
        assert output.sums["actor/dpo_accuracy"].item() == 2 * (margin > 0).sum()


def test_dpo_starts_at_log_two_with_even_odds() -> None:
    batch = draw(3, 4, [5], torch.float32, distance=0.0)
    output = dpo(batch, DpoSettings(beta=2000.0))
    assert output.loss.tolist() == pytest.approx([math.log(2)] * 4)
    assert output.sums["actor/dpo_accuracy"].item() / 4 == 0.5
    backward(output.loss)
    error = as_float64(batch.velocity) - seen_by(batch).target
    sign = np.array([1.0, -1.0, 1.0, -1.0])[:, None]  # towards the winner, away from the loser
    close(gradient(batch.velocity), sign * 2 * 0.5 * 1000.0 * 2 * error / 5, 1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 4), inner=SHAPES)
def test_noisy_is_the_forward_process(seed: int, rows: int, inner: list[int]) -> None:
    batch = draw(seed, rows, inner, torch.float64)
    inputs = seen_by(batch)
    sigma = per_row(inputs.sigma, inputs.clean)
    close(noisy(batch.clean, batch.noise, batch.sigma), (1 - sigma) * inputs.clean + sigma * inputs.noise, 1e-12)
    # Its velocity leads back to the clean latents and on to the noise.
    x_sigma = as_float64(noisy(batch.clean, batch.noise, batch.sigma))
    np.testing.assert_allclose(x_sigma - sigma * inputs.target, inputs.clean, atol=1e-12)
    np.testing.assert_allclose(x_sigma + (1 - sigma) * inputs.target, inputs.noise, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "part"), [(diffusion_nft, DiffusionNftSettings(kl_coef=0.1)), (dpo, DpoSettings(beta=0.1))]
)
def test_only_the_current_velocity_has_a_gradient(loss: object, part: object) -> None:
    batch = draw(4, 2, [3], torch.float64)
    others = [batch.clean, batch.noise, batch.sigma, batch.advantages, batch.old_velocity, batch.reference_velocity]
    constants = [tensor for tensor in others[3:] if tensor is not None]
    for tensor in constants:
        tensor.requires_grad_()
    backward(loss(batch, part).loss)  # type: ignore[operator]
    assert gradient(batch.velocity).abs().max() > 0
    assert all(tensor.grad is None for tensor in constants)


@pytest.mark.parametrize("loss", [diffusion_nft, dpo])
def test_a_bfloat16_velocity_is_taken_into_the_latents_dtype(loss: object) -> None:
    batch = draw(5, 2, [8], torch.float32)
    fields = {name: getattr(batch, name) for name in MatchingRows.__slots__}
    halves = {name: fields[name].detach().bfloat16() for name in ("velocity", "old_velocity", "reference_velocity")}
    part = DiffusionNftSettings(beta=0.1)
    rounded = {name: value.float() for name, value in halves.items()}
    half, full = (loss(MatchingRows(**fields | changed), part).loss for changed in (halves, rounded))  # type: ignore[operator]
    assert half.dtype == torch.float32
    assert torch.equal(half, full)


@pytest.mark.parametrize(
    ("mode", "shares"),
    [
        ("all", [0.0, 0.35, 0.5, 0.65, 1.0]),
        ("positive", [0.5, 0.5, 0.5, 0.65, 1.0]),
        ("negative", [0.0, 0.35, 0.5, 0.5, 0.5]),
        ("sign", [0.4, 0.4, 0.5, 0.6, 0.6]),
        ("positive_sign", [0.5, 0.5, 0.5, 0.6, 0.6]),
    ],
)
def test_what_the_modes_read_of_an_advantage(mode: Any, shares: list[float]) -> None:
    """The share of L+ for the advantages -9, -1.5, 0, 1.5 and 9 with a clamp of 5, read off two losses of the row."""
    rows = draw(0, 1, [3], torch.float64)
    seen = [
        diffusion_nft(
            replace(rows, advantages=torch.tensor([value]).double()), DiffusionNftSettings(advantage_mode=mode)
        )
        for value in (-9.0, -1.5, 0.0, 1.5, 9.0)
    ]
    sums = seen[0].sums
    positive, negative = (sums[f"actor/nft_{name}_loss"].item() for name in ("positive", "negative"))
    got = [(output.loss.item() * 0.1 / 5 - negative) / (positive - negative) for output in seen]
    assert got == pytest.approx(shares)


def test_a_row_without_a_tie_does_not_feel_the_reference() -> None:
    """Loss and gradient are then those without `kl_coef`; the charted distance is of all rows."""
    tied, free = draw(6, 3, [4], torch.float64), draw(6, 3, [4], torch.float64)
    whole, part = draw(6, 3, [4], torch.float64), DiffusionNftSettings(kl_coef=0.5)
    output = diffusion_nft(replace(tied, ties=torch.tensor([1.0, 0.0, 1.0]).double()), part)
    with_all, without = diffusion_nft(whole, part), diffusion_nft(free, DiffusionNftSettings())
    for found in (output, with_all, without):
        backward(found.loss)
    gradients = torch.stack([gradient(batch.velocity) for batch in (whole, free, whole)], 1)
    wanted = torch.stack([gradients[0, 0], gradients[1, 1], gradients[2, 2]])
    assert torch.equal(gradient(tied.velocity), wanted)
    assert torch.equal(output.loss, torch.stack([with_all.loss[0], without.loss[1], with_all.loss[2]]))
    assert torch.equal(output.sums["actor/kl_loss"], with_all.sums["actor/kl_loss"])


def test_old_policy_decay_follows_the_published_schedules() -> None:
    copy = OldPolicyPart(rate=0.0)
    assert [old_policy_decay(copy, step) for step in (0, 10, 10_000)] == [0.0, 0.0, 0.0]
    linear = OldPolicyPart(rate=0.001, max=0.5)
    assert [old_policy_decay(linear, step) for step in (0, 100, 500, 900)] == pytest.approx([0.0, 0.1, 0.5, 0.5])
    delayed = OldPolicyPart(rate=0.0075, max=0.999, delay=75)
    steps = (0, 74, 75, 76, 175, 1000)
    assert [old_policy_decay(delayed, step) for step in steps] == pytest.approx([0, 0, 0, 0.0075, 0.75, 0.999])
    epochs = (37, 50, 100)  # of two updates each, in their OCR configuration
    assert [old_policy_decay(delayed, 2 * (epoch + 1)) for epoch in epochs] == pytest.approx([0.0075, 0.2025, 0.9525])
    constant = OldPolicyPart(rate=1.0, max=0.9)
    assert [old_policy_decay(constant, number) for number in (1, 2, 1000)] == [0.9] * 3
