"""Rollout correction against the formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.algorithms.correction import agreement_metrics, correct
from flowfleet.algorithms.losses import Limits, PolicyRows, flow_grpo
from flowfleet.job.spec import CorrectionPart
from tests.flowfleet.algorithms.numerics import PRECISIONS, as_float64, close


def weight(part: CorrectionPart, gap: float, bypass: bool) -> tuple[float, bool]:
    """Weight of one row, and whether it is outside, by the definitions."""
    ratio = math.exp(max(-20.0, min(20.0, gap)))
    if part.mode == "truncated":
        return min(part.high, ratio) / (ratio if bypass else 1.0), ratio > part.high
    is_inside = part.low <= ratio <= part.high
    return (ratio if part.mode == "band" and not bypass else 1.0) * is_inside, not is_inside


@PRECISIONS
@pytest.mark.parametrize("mode", ["truncated", "band", "rejection"])
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 8),
    spread=st.sampled_from([0.0, 0.5, 30.0]),
    low=st.floats(0.1, 1.0),
    high=st.floats(1.0, 5.0),
    bypass=st.booleans(),
)
def test_weights_match_the_definitions(
    mode: str,
    dtype: torch.dtype,
    tolerance: float,
    seed: int,
    rows: int,
    spread: float,
    low: float,
    high: float,
    bypass: bool,
) -> None:
    part = CorrectionPart.model_validate({"mode": mode, "low": low, "high": high})
    rng = np.random.default_rng(seed)
    rollout = torch.tensor(rng.normal(0, 3, rows), dtype=dtype)
    gaps = rng.normal(0, spread, rows)
    old = (rollout + torch.tensor(gaps, dtype=dtype)).requires_grad_()
    result = correct(part, old, rollout, bypass=bypass)
    seen = as_float64(old.detach() - rollout)
    expected = [weight(part, gap, bypass) for gap in seen.tolist()]
    assert result.weights is not None
    assert not result.weights.requires_grad
    ratios = np.exp(np.clip(seen, -20, 20))
    clear = np.minimum(abs(ratios - low), abs(ratios - high)) > 1e-5  # float32 may see others on a bound
    close(result.weights[clear], np.array([value for value, _ in expected])[clear], tolerance)
    assert result.outside[clear].tolist() == np.array([outside for _, outside in expected])[clear].tolist()


def test_none_gives_no_weights_but_still_the_gap() -> None:
    result = correct(CorrectionPart(), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.5]), bypass=False)
    assert result.weights is None
    assert result.log_ratio.tolist() == [0.0, 0.5]
    assert result.outside.tolist() == [False, False]
    assert {name: value.item() for name, value in result.sums().items()} == {
        "rollout_corr/outside": 0.0,
        "rollout_corr/weight_mean": 2.0,
    }
    metrics = agreement_metrics(result.log_ratio)
    assert metrics["rollout_corr/exact"] == 0.5
    assert metrics["rollout_corr/log_ratio_abs_max"] == 0.5
    assert metrics["rollout_corr/log_ratio_abs_mean"] == 0.25
    assert metrics["rollout_corr/ratio_mean"] == pytest.approx((1 + math.exp(0.5)) / 2)
    assert "rollout_corr/beyond_clip" not in metrics


def test_how_far_rows_are_from_agreement() -> None:
    """Ratios on both sides of a clip range of 0.1: 1 - 0.2, 1 - 0.05, 1, 1 + 0.05 and 1 + 0.2; then many at once."""
    ratios = torch.tensor([0.8, 0.95, 1.0, 1.05, 1.2], dtype=torch.float64)
    assert agreement_metrics(ratios.log(), Limits(0.1, 1.0))["rollout_corr/beyond_clip"] == 0.4
    gaps = torch.linspace(-1, 1, 2001, dtype=torch.float64)[torch.randperm(2001)]
    assert agreement_metrics(gaps)["rollout_corr/log_ratio_abs_p99"] == pytest.approx(0.99, abs=1e-3)


@pytest.mark.parametrize("mode", ["truncated", "band", "rejection"])
@pytest.mark.parametrize("bypass", [False, True])
def test_equal_log_probs_weigh_exactly_one(mode: str, bypass: bool) -> None:
    """Holds for bounds of exactly 1 as well: they are inclusive."""
    part = CorrectionPart.model_validate({"mode": mode, "low": 1.0, "high": 1.0})
    log_prob = torch.randn(5)
    result = correct(part, log_prob, log_prob.clone(), bypass=bypass)
    assert result.weights is not None
    assert result.weights.tolist() == [1.0] * 5
    assert not result.outside.any()


def test_sums_count_rows_outside_and_add_up_to_the_mean_weight() -> None:
    part = CorrectionPart(mode="band", low=0.5, high=2.0)
    gaps = torch.tensor([math.log(3.0), math.log(0.4), math.log(1.5), 0.0], dtype=torch.float64)
    sums = correct(part, gaps, torch.zeros_like(gaps), bypass=False).sums()
    assert sums["rollout_corr/outside"].item() == 2
    assert sums["rollout_corr/weight_mean"].item() == pytest.approx(0 + 0 + 1.5 + 1)


def test_ratios_do_not_overflow() -> None:
    gaps = torch.tensor([65_536.0, -65_536.0])
    for mode, bypass in (("truncated", False), ("rejection", True)):
        result = correct(CorrectionPart.model_validate({"mode": mode}), gaps, torch.zeros(2), bypass=bypass)
        assert result.weights is not None
        assert torch.isfinite(result.weights).all()
        assert result.log_ratio.tolist() == [20.0, -20.0]


def test_bypassing_truncation_bounds_the_losss_own_ratio() -> None:
    """Far below and above the clip range: the loss of a row never weighs more than `high` times its advantage."""
    rollout = torch.zeros(3, dtype=torch.float64)
    current = torch.log(torch.tensor([0.5, 1.5, 7.0], dtype=torch.float64))
    part = CorrectionPart(mode="truncated", high=2.0)
    weights = correct(part, current, rollout, bypass=True).weights
    rows = PolicyRows(current, rollout, -torch.ones(3, dtype=torch.float64), weights)
    assert flow_grpo(rows, Limits(0.9, 1.0)).loss.tolist() == pytest.approx([0.5, 1.5, 2.0])


@PRECISIONS
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 8),
    steps=st.integers(1, 4),
    mode=st.sampled_from(["truncated", "band", "rejection"]),
    level=st.sampled_from(["step", "sequence"]),
)
def test_levels_match_the_definitions(
    dtype: torch.dtype, tolerance: float, seed: int, rows: int, steps: int, mode: str, level: str
) -> None:
    part = CorrectionPart.model_validate({"mode": mode, "low": 0.5, "high": 1.5, "level": level})
    rng = np.random.default_rng(seed)
    rollout = torch.tensor(rng.normal(0, 3, (steps, rows)), dtype=dtype)
    old = rollout + torch.tensor(rng.normal(0, 0.5, (steps, rows)), dtype=dtype)
    seen = as_float64(old - rollout)
    if level == "sequence":
        seen = np.broadcast_to(seen.mean(0), seen.shape)
    ratios = np.exp(seen)
    expected = np.array([[weight(part, gap, False)[0] for gap in row] for row in seen.tolist()])
    found = correct(part, old, rollout, bypass=False).weights
    assert found is not None
    clear = np.min([abs(ratios - bound) for bound in (0.5, 1.5)], axis=0) > 1e-4  # float32 may see others on a bound
    close(found[torch.tensor(clear)], expected[clear], tolerance * 10)
