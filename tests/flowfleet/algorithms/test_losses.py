"""Policy losses, KL and limits against float64 oracles written from the formulas, and statistics against NumPy."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flowfleet.algorithms.builtin.policy import FlowDppoSettings, FlowGrpoSettings
from flowfleet.algorithms.losses import (
    Limits,
    PolicyLoss,
    PolicyRows,
    RatioStats,
    clip_range_from_nats,
    flow_dppo,
    flow_grpo,
    grpo_guard,
    limits,
    ratio_stats,
    reference_kl,
)
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

ANY = Limits(1e-5, 1e-5)


@dataclass(frozen=True)
class Inputs:
    """Float64 values of a batch, as the oracles read them."""

    log_prob: Array
    old: Array
    advantages: Array
    weights: Array
    mean: Array
    old_mean: Array
    std: Array
    dt: Array


@dataclass(frozen=True)
class Expected:
    loss: Array
    log_prob_gradient: Array
    mean_gradient: Array
    log_ratio: Array
    """Ratio that the loss limits."""
    is_close_call: NDArray[np.bool_]
    """Rows within float32's rounding of a limit, which may fall on either side of it."""


def drift(inputs: Inputs) -> Array:
    """mean((mu - mu_old)^2) / (2 std^2), 0 without noise."""
    squared = row_mean((inputs.mean - inputs.old_mean) ** 2)
    return np.divide(squared, 2 * inputs.std**2, out=np.zeros_like(squared), where=inputs.std > 0)


def surrogate(log_ratio: Array, advantages: Array, clip: float) -> tuple[Array, Array]:
    """max(-A rho, -A clip(rho)) and its derivative by the log-ratio: 0 where the flat branch is greater."""
    rho = np.exp(log_ratio)
    is_flat = ((advantages > 0) & (rho > 1 + clip)) | ((advantages < 0) & (rho < 1 - clip))
    value = np.maximum(-advantages * rho, -advantages * np.clip(rho, 1 - clip, 1 + clip))
    return value, np.where(is_flat, 0.0, -advantages * rho)


def near(values: Array, bound: float, rounding: float) -> NDArray[np.bool_]:
    return np.asarray(np.abs(values - bound) <= rounding, dtype=np.bool_)


def flow_grpo_oracle(inputs: Inputs, bounds: Limits) -> Expected:
    log_ratio, clip = inputs.log_prob - inputs.old, bounds.clip_range
    value, slope = surrogate(log_ratio, inputs.advantages, clip)
    calls = near(np.exp(log_ratio), 1 + clip, 1e-6) | near(np.exp(log_ratio), 1 - clip, 1e-6)
    return Expected(inputs.weights * value, inputs.weights * slope, np.zeros_like(inputs.mean), log_ratio, calls)


def grpo_guard_oracle(inputs: Inputs, bounds: Limits) -> Expected:
    log_ratio, clip = (inputs.log_prob - inputs.old + drift(inputs)) * inputs.std, bounds.clip_range
    value, slope = surrogate(log_ratio, inputs.advantages, clip)
    slope = inputs.weights * slope / -inputs.dt
    # d log_ratio / d mean = std * (mean - old_mean) / (std^2 D)
    difference, std = inputs.mean - inputs.old_mean, per_row(inputs.std, inputs.mean)
    pull = np.divide(difference, std, out=np.zeros_like(difference), where=std > 0) / difference[0].size
    calls = near(np.exp(log_ratio), 1 + clip, 1e-6) | near(np.exp(log_ratio), 1 - clip, 1e-6)
    gradient = per_row(slope, pull) * pull
    return Expected(inputs.weights * value / -inputs.dt, slope * inputs.std, gradient, log_ratio, calls)


def flow_dppo_oracle(inputs: Inputs, bounds: Limits) -> Expected:
    log_ratio, kl = inputs.log_prob - inputs.old, drift(inputs)
    is_away = ((inputs.advantages > 0) & (log_ratio > 0)) | ((inputs.advantages < 0) & (log_ratio < 0))
    value = np.where(is_away & (kl >= bounds.kl_threshold), 0.0, -inputs.advantages * np.exp(log_ratio))
    calls = near(kl, bounds.kl_threshold, 1e-6 * bounds.kl_threshold)
    return Expected(inputs.weights * value, inputs.weights * value, np.zeros_like(inputs.mean), log_ratio, calls)


Oracle = Callable[[Inputs, Limits], Expected]
ORACLES: dict[PolicyLoss, Oracle] = {
    flow_grpo: flow_grpo_oracle,
    grpo_guard: grpo_guard_oracle,
    flow_dppo: flow_dppo_oracle,
}

EVERY_LOSS = pytest.mark.parametrize("loss", ORACLES, ids=lambda loss: loss.__name__)


def draw(seed: int, rows: int, inner: list[int], limit: float, spread: float, zero_std: bool) -> Inputs:
    """Log-ratios and drifts of the size of the limit, so that rows fall on all sides of it."""
    rng = np.random.default_rng(seed)
    std = rng.uniform(0.05, 1.5, rows)
    std[: (rows + 1) // 2] *= not zero_std
    old, old_mean = rng.normal(0, 2, rows), rng.normal(size=(rows, *inner))
    shift = rng.normal(size=(rows, *inner)) * per_row(std + 0.1, old_mean) * math.sqrt(2 * limit * spread)
    return Inputs(
        log_prob=old + rng.normal(0, 1, rows) * limit * spread,
        old=old,
        advantages=rng.normal(0, 3, rows) * rng.integers(0, 2, rows),
        weights=rng.uniform(0, 2, rows),
        mean=old_mean + shift,
        old_mean=old_mean,
        std=std,
        dt=-rng.uniform(0.02, 0.3, rows),
    )


def tensors(inputs: Inputs, dtype: torch.dtype) -> PolicyRows:
    def cast(values: Array) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return PolicyRows(
        cast(inputs.log_prob).requires_grad_(),
        cast(inputs.old),
        cast(inputs.advantages),
        cast(inputs.weights),
        cast(inputs.mean).requires_grad_(),
        cast(inputs.old_mean),
        cast(inputs.std),
        cast(inputs.dt),
    )


def seen_by(rows: PolicyRows) -> Inputs:
    """The inputs as `rows` has them: rounded to its dtype."""
    fields = (
        rows.log_prob,
        rows.old_log_prob,
        rows.advantages,
        rows.weights,
        rows.mean,
        rows.old_mean,
        rows.std,
        rows.dt,
    )
    return Inputs(*(as_float64(field) for field in fields if field is not None))


@PRECISIONS
@EVERY_LOSS
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    inner=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    limit=st.sampled_from([1e-5, 1e-3, 0.2]),
    spread=st.sampled_from([0.0, 1.0, 5.0]),
    zero_std=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_losses_and_gradients_match_the_formulas(
    loss: PolicyLoss,
    dtype: torch.dtype,
    tolerance: float,
    rows: int,
    inner: list[int],
    limit: float,
    spread: float,
    zero_std: bool,
    seed: int,
) -> None:
    bounds = Limits(clip_range=limit, kl_threshold=limit)
    batch = tensors(draw(seed, rows, inner, limit, spread, zero_std), dtype)
    output = loss(batch, bounds)
    backward(output.loss)
    expected = ORACLES[loss](seen_by(batch), bounds)
    clear = ~expected.is_close_call if dtype == torch.float32 else np.ones(rows, dtype=bool)
    close(output.loss[clear], expected.loss[clear], tolerance)
    close(gradient(batch.log_prob)[clear], expected.log_prob_gradient[clear], tolerance)
    close(gradient(batch.mean)[clear], expected.mean_gradient[clear], tolerance)
    mean = output.stats.metrics()["actor/ratio_mean"] - 1
    assert mean == pytest.approx(np.expm1(expected.log_ratio).mean(), rel=1e-3, abs=1e-7)


@EVERY_LOSS
def test_first_minibatch_has_ratio_one_and_the_plain_policy_gradient(
    loss: PolicyLoss,
) -> None:
    log_prob = torch.tensor([0.3, -0.2, 1.5], requires_grad=True)
    mean = torch.randn(3, 4, requires_grad=True)
    rows = PolicyRows(
        log_prob,
        log_prob.detach(),
        torch.tensor([1.0, -2.0, 0.0]),
        mean=mean,
        old_mean=mean.detach(),
        std=torch.ones(3),
        dt=-torch.ones(3),
    )
    output = loss(rows, ANY)
    backward(output.loss)
    assert output.loss.tolist() == [-1.0, 2.0, 0.0]
    assert gradient(log_prob).tolist() == [-1.0, 2.0, 0.0]
    assert gradient(mean).abs().max() == 0
    metrics = output.stats.metrics()
    assert (metrics["actor/ratio_mean"], metrics["actor/ratio_std"], metrics["actor/pg_clipfrac"]) == (1.0, 0.0, 0.0)
    assert (metrics["actor/ratio_min"], metrics["actor/ratio_max"], metrics["actor/ppo_kl"]) == (1.0, 1.0, 0.0)


@EVERY_LOSS
def test_old_values_weights_and_advantages_are_constants(loss: PolicyLoss) -> None:
    constants = {
        "old_log_prob": torch.zeros(2, requires_grad=True),
        "advantages": torch.ones(2, requires_grad=True),
        "weights": torch.ones(2, requires_grad=True),
        "old_mean": torch.zeros(2, 3, requires_grad=True),
    }
    log_prob = torch.tensor([0.1, -0.1], requires_grad=True)
    rows = PolicyRows(log_prob, mean=torch.full((2, 3), 0.1), std=torch.ones(2), dt=-torch.ones(2), **constants)
    backward(loss(rows, Limits(0.5, 100.0)).loss)
    assert gradient(log_prob).abs().min() > 0
    assert all(tensor.grad is None for tensor in constants.values())


def test_guards_exponent_is_the_noise_times_the_drift() -> None:
    """Another way to the same: for x' = mu_old + s e the normalized log-ratio is mean(e (mu - mu_old))."""
    rng = np.random.default_rng(0)
    std = np.array([0.05, 0.4, 1.2])
    old_mean, noise = rng.normal(size=(3, 50)), rng.normal(size=(3, 50))
    mean = old_mean + 1e-3 * rng.normal(size=(3, 50))
    sample = old_mean + std[:, None] * noise

    def log_prob(center: Array) -> Array:
        distance = row_mean((sample - center) ** 2) / (2 * std**2)
        return np.asarray(-distance - np.log(std) - 0.5 * math.log(2 * math.pi))

    inputs = Inputs(log_prob(mean), log_prob(old_mean), np.ones(3), np.ones(3), mean, old_mean, std, np.full(3, -1.0))
    loss = grpo_guard(tensors(inputs, torch.float64), Limits(0.5, 1.0)).loss
    np.testing.assert_allclose(as_float64(loss), -np.exp(row_mean(noise * (mean - old_mean))), rtol=1e-12)


def test_guard_scales_every_row_by_itself() -> None:
    """A row's loss does not change when rows of other steps join its batch."""
    together = tensors(draw(3, 4, [6], 1e-3, 1.0, False), torch.float64)
    all_rows = grpo_guard(together, ANY).loss
    for row in range(4):
        fields = {name: getattr(together, name)[row : row + 1] for name in PolicyRows.__slots__}
        assert torch.equal(grpo_guard(PolicyRows(**fields), ANY).loss, all_rows[row : row + 1])


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "far", "masked"),
    [
        (1.0, 0.1, True, True),  # better than its peers and already likelier: it would move on
        (-1.0, -0.1, True, True),  # worse and already less likely
        (1.0, -0.1, True, False),  # better but less likely than before: it moves back
        (-1.0, 0.1, True, False),
        (1.0, 0.1, False, False),  # inside the trust region
        (1.0, 0.0, True, False),
        (0.0, 0.1, True, False),
    ],
)
def test_dppo_masks_only_far_rows_that_move_further(
    advantage: float, log_ratio: float, far: bool, masked: bool
) -> None:
    log_prob = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    mean = torch.full((1, 4), 1.0 if far else 1e-3, dtype=torch.float64)  # KL 0.5, or 5e-7
    rows = PolicyRows(
        log_prob,
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        mean=mean,
        old_mean=torch.zeros_like(mean),
        std=torch.ones(1, dtype=torch.float64),
    )
    output = flow_dppo(rows, ANY)
    backward(output.loss)
    expected = 0.0 if masked else -advantage * math.exp(log_ratio)
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    assert gradient(log_prob).item() == pytest.approx(expected, rel=1e-12)
    metrics = output.stats.metrics()
    assert metrics["actor/pg_clipfrac_higher"] == float(masked and log_ratio > 0)
    assert metrics["actor/pg_clipfrac_lower"] == float(masked and log_ratio < 0)


def test_a_masked_ratio_that_overflows_leaves_no_nan() -> None:
    log_prob = torch.tensor([200.0, 0.1], requires_grad=True)
    rows = PolicyRows(
        log_prob, torch.zeros(2), torch.ones(2), mean=torch.ones(2, 3), old_mean=torch.zeros(2, 3), std=torch.ones(2)
    )
    loss = flow_dppo(rows, ANY).loss
    backward(loss)
    assert loss.tolist() == [0.0, 0.0]
    assert gradient(log_prob).tolist() == [0.0, 0.0]


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 2**31))
def test_statistics_add_up_over_micro_batches(sizes: list[int], seed: int) -> None:
    clip = 1e-5
    log_ratios = np.random.default_rng(seed).normal(0, 2e-5, sum(sizes))
    parts = torch.split(torch.tensor(log_ratios, dtype=torch.float32), sizes)
    total: RatioStats | None = None
    for part in parts:
        stats = flow_grpo(PolicyRows(part, torch.zeros_like(part), torch.ones_like(part)), Limits(clip, 1.0)).stats
        total = stats if total is None else total + stats
    assert total is not None
    metrics = total.metrics()
    exact = torch.cat(parts).double().numpy()
    rho = np.exp(exact)
    # float32 sums of rho - 1 keep seven digits of a spread that float32 sums of rho would round away.
    assert metrics["actor/ratio_mean"] - 1 == pytest.approx(np.expm1(exact).mean(), rel=1e-4, abs=1e-10)
    assert metrics["actor/ratio_std"] == pytest.approx(np.expm1(exact).std(), abs=1e-3 * np.abs(exact).max())
    assert metrics["actor/ratio_min"] == pytest.approx(rho.min(), abs=1e-9)
    assert metrics["actor/ratio_max"] == pytest.approx(rho.max(), abs=1e-9)
    assert metrics["actor/pg_clipfrac_higher"] == pytest.approx((rho - 1 > clip).mean())
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx((1 - rho > clip).mean())
    assert metrics["actor/pg_clipfrac"] == pytest.approx((np.abs(rho - 1) > clip).mean())
    assert metrics["actor/ppo_kl"] == pytest.approx((exact**2 / 2).mean(), rel=1e-4)


def test_the_kl_of_the_statistics_is_of_the_plain_ratio() -> None:
    log_ratio, raw, none = torch.tensor([0.1, 0.3]), torch.tensor([1.0, 2.0]), torch.zeros(2, dtype=torch.bool)
    metrics = ratio_stats(log_ratio, none, none, raw=raw).metrics()
    assert metrics["actor/ppo_kl"] == pytest.approx((1 + 4) / 4)
    assert metrics["actor/ratio_max"] == pytest.approx(math.exp(0.3))


def test_no_rows_give_no_metrics() -> None:
    assert RatioStats(torch.zeros(6), torch.zeros(2)).metrics() == {}


@PRECISIONS
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 5), inner=st.lists(st.integers(1, 6), min_size=1, max_size=3), seed=st.integers(0, 2**31))
def test_reference_kl_matches_the_formula(
    dtype: torch.dtype, tolerance: float, rows: int, inner: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    mean = torch.tensor(rng.normal(size=(rows, *inner)), dtype=dtype, requires_grad=True)
    reference = torch.tensor(rng.normal(size=(rows, *inner)), dtype=dtype)
    std = torch.tensor(rng.uniform(0.1, 2, rows), dtype=dtype)
    kl = reference_kl(mean, reference, std)
    backward(kl)
    difference, variance = as_float64(mean) - as_float64(reference), as_float64(std) ** 2
    close(kl, row_mean(difference**2) / (2 * variance), tolerance)
    close(gradient(mean), difference / per_row(variance, difference) / difference[0].size, tolerance)


def test_reference_kl_equals_torchs_gaussian_kl() -> None:
    mean, reference, std = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64), torch.rand(3)
    std = std.double() + 0.1
    p, q = (torch.distributions.Normal(m, std[:, None]) for m in (mean, reference))
    expected = torch.distributions.kl_divergence(p, q).mean(dim=1)
    torch.testing.assert_close(reference_kl(mean, reference, std), expected)


def test_reference_kl_of_a_step_without_noise_is_zero_with_zero_gradient() -> None:
    mean = torch.ones(2, 4, requires_grad=True)
    kl = reference_kl(mean, torch.zeros(2, 4), torch.tensor([0.0, 1.0]))
    backward(kl)
    assert kl.tolist() == [0.0, 0.5]
    assert gradient(mean)[0].tolist() == [0.0] * 4


def test_clip_range_in_nats() -> None:
    # c = 1e-5 of Qwen-Image at 512x512 (65,536 elements) is 0.66 nats.
    assert clip_range_from_nats(0.65536, 65_536) == pytest.approx(1e-5, rel=1e-5)
    for num_elements in (1024, 65_536, 262_144):  # one setting, the same joint ratio at every size
        clip = clip_range_from_nats(0.5, num_elements)
        assert num_elements * math.log1p(clip) == pytest.approx(0.5)


@pytest.mark.parametrize(("nats", "num_elements"), [(0.0, 10), (-1.0, 10), (1.0, 0), (10.0, 10), (math.nan, 10)])
def test_bad_nats_are_refused(nats: float, num_elements: int) -> None:
    with pytest.raises(ValueError, match="nats"):
        clip_range_from_nats(nats, num_elements)


def test_limits_of_a_job_are_per_element_or_in_nats_of_the_whole_sample() -> None:
    plain = FlowGrpoSettings(clip_range=3e-5)
    assert limits(plain, 1024) == limits(plain, 65_536) == Limits(3e-5, settings=plain)
    assert limits(FlowDppoSettings(kl_threshold=2e-5), 1024).kl_threshold == 2e-5
    for num_elements in (1024, 65_536):
        bounds = limits(FlowGrpoSettings(clip_nats=0.66), num_elements)
        assert num_elements * math.log1p(bounds.clip_range) == pytest.approx(0.66)
