"""Losses, KL and clip ranges against float64 oracles written from the formulas, and statistics against NumPy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flowfleet.algorithms.losses import (
    LOSSES,
    PolicyRows,
    RatioStats,
    clip_range_from_nats,
    flow_grpo,
    ratio_stats,
    reference_kl,
)

Array = NDArray[np.float64]


def surrogate(clip: float, log_prob: Array, old: Array, advantages: Array, weights: Array) -> Array:
    a, rho = np.clip(advantages, -5, 5), np.exp(log_prob - old)
    return np.asarray(weights * np.maximum(-a * rho, -a * np.clip(rho, 1 - clip, 1 + clip)))


def surrogate_gradient(clip: float, log_prob: Array, old: Array, advantages: Array, weights: Array) -> Array:
    """Zero where the clipped branch is greater and flat, else -A rho."""
    a, rho = np.clip(advantages, -5, 5), np.exp(log_prob - old)
    flat = ((a > 0) & (rho > 1 + clip)) | ((a < 0) & (rho < 1 - clip))
    return np.asarray(np.where(flat, 0.0, weights * -a * rho))


def close(actual: torch.Tensor, expected: Array, tolerance: float) -> None:
    """Within `tolerance` of the largest element."""
    np.testing.assert_allclose(actual.double(), expected, rtol=0, atol=tolerance * np.abs(expected).max(initial=0))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 17),
    clip=st.sampled_from([1e-5, 1e-3, 0.2]),
    spread=st.sampled_from([0.0, 1.0, 10.0]),
    weighted=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_flow_grpo_matches_the_formula(
    dtype: torch.dtype, tolerance: float, rows: int, clip: float, spread: float, weighted: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    old = torch.tensor(rng.normal(0, 2, rows), dtype=dtype)
    log_prob = (old + torch.tensor(rng.normal(0, 1, rows) * clip * spread, dtype=dtype)).requires_grad_()
    advantages = torch.tensor(rng.normal(0, 3, rows), dtype=dtype)
    weights = torch.tensor(rng.uniform(0, 2, rows), dtype=dtype) if weighted else None
    output = flow_grpo(PolicyRows(log_prob, old, advantages, weights), clip_range=clip)
    output.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert log_prob.grad is not None
    weight = torch.ones(rows) if weights is None else weights
    as_numpy = [t.detach().double().numpy() for t in (log_prob, old, advantages, weight)]
    expected, gradient = surrogate(clip, *as_numpy), surrogate_gradient(clip, *as_numpy)
    close(output.loss.detach(), expected, tolerance)
    # Ratios within rounding of a clip bound may fall on either side.
    rho = np.exp(as_numpy[0] - as_numpy[1])
    clear = np.minimum(np.abs(rho - 1 - clip), np.abs(rho - 1 + clip)) > 1e-6 * (dtype == torch.float32)
    close(log_prob.grad[clear], gradient[clear], tolerance)


def test_first_minibatch_has_ratio_one_and_the_plain_policy_gradient() -> None:
    log_prob = torch.tensor([0.3, -0.2, 1.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 7.0])
    output = flow_grpo(PolicyRows(log_prob, log_prob.detach(), advantages), clip_range=1e-5)
    output.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert output.loss.tolist() == [-1.0, 2.0, -5.0]
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [-1.0, 2.0, -5.0]
    metrics = output.stats.metrics()
    assert (metrics["actor/ratio_mean"], metrics["actor/ratio_std"], metrics["actor/pg_clipfrac"]) == (1.0, 0.0, 0.0)
    assert (metrics["actor/ratio_min"], metrics["actor/ratio_max"], metrics["actor/ppo_kl"]) == (1.0, 1.0, 0.0)


def test_weights_and_old_log_probs_are_constants() -> None:
    old = torch.zeros(2, requires_grad=True)
    weights = torch.ones(2, requires_grad=True)
    log_prob = torch.tensor([0.1, -0.1], requires_grad=True)
    loss = flow_grpo(PolicyRows(log_prob, old, torch.ones(2), weights), clip_range=0.5).loss
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert old.grad is None
    assert weights.grad is None


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 2**31))
def test_statistics_add_up_over_micro_batches(sizes: list[int], seed: int) -> None:
    clip = 1e-5
    log_ratios = np.random.default_rng(seed).normal(0, 2e-5, sum(sizes))
    parts = torch.split(torch.tensor(log_ratios, dtype=torch.float32), sizes)
    total = ratio_stats(parts[0], clip)
    for part in parts[1:]:
        total = total + ratio_stats(part, clip)
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


def test_no_rows_give_no_metrics() -> None:
    assert RatioStats(torch.zeros(6), torch.zeros(2)).metrics() == {}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 5), inner=st.lists(st.integers(1, 6), min_size=1, max_size=3), seed=st.integers(0, 2**31))
def test_reference_kl_matches_the_formula(
    dtype: torch.dtype, tolerance: float, rows: int, inner: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    mean = torch.tensor(rng.normal(size=(rows, *inner)), dtype=dtype, requires_grad=True)
    reference = torch.tensor(rng.normal(size=(rows, *inner)), dtype=dtype)
    std = torch.tensor(rng.uniform(0.1, 2, rows), dtype=dtype)
    kl = reference_kl(mean, reference, std)
    kl.sum().backward()  # type: ignore[no-untyped-call]
    difference = (mean.detach() - reference).double().numpy().reshape(rows, -1)
    variance = std.double().numpy()[:, None] ** 2
    np.testing.assert_allclose(kl.detach().double(), (difference**2 / (2 * variance)).mean(1), rtol=tolerance)
    gradient = difference / variance / difference.shape[1]
    assert mean.grad is not None
    np.testing.assert_allclose(
        mean.grad.double().numpy().reshape(rows, -1), gradient, rtol=tolerance, atol=tolerance * np.abs(gradient).max()
    )


def test_reference_kl_equals_torchs_gaussian_kl() -> None:
    mean, reference, std = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64), torch.rand(3)
    std = std.double() + 0.1
    p, q = (torch.distributions.Normal(m, std[:, None]) for m in (mean, reference))
    expected = torch.distributions.kl_divergence(p, q).mean(dim=1)
    torch.testing.assert_close(reference_kl(mean, reference, std), expected)


def test_reference_kl_of_a_step_without_noise_is_zero_with_zero_gradient() -> None:
    mean = torch.ones(2, 4, requires_grad=True)
    kl = reference_kl(mean, torch.zeros(2, 4), torch.tensor([0.0, 1.0]))
    kl.sum().backward()  # type: ignore[no-untyped-call]
    assert kl.tolist() == [0.0, 0.5]
    assert mean.grad is not None
    assert mean.grad[0].tolist() == [0.0] * 4


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


def test_losses_are_found_by_the_job_files_names() -> None:
    assert LOSSES["flow_grpo"] is flow_grpo
