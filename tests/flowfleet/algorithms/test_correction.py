"""Rollout correction against the formula."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowfleet.algorithms.correction import CorrectionMode, agreement_metrics, correct


@given(
    gaps=st.lists(st.floats(-30, 30), min_size=1, max_size=8), threshold=st.floats(0.5, 5.0), base=st.floats(-5.0, 5.0)
)
def test_truncated_weights_match_the_formula(gaps: list[float], threshold: float, base: float) -> None:
    rollout = torch.full((len(gaps),), base, dtype=torch.float64)
    old = (rollout + torch.tensor(gaps, dtype=torch.float64)).requires_grad_()
    result = correct("truncated", old, rollout, threshold=threshold)
    expected = [min(math.exp(max(-20.0, min(20.0, float(gap)))), threshold) for gap in (old.detach() - rollout)]
    assert result.weights is not None
    assert not result.weights.requires_grad
    np.testing.assert_allclose(result.weights, expected, rtol=1e-12)


def test_none_gives_no_weights_but_still_the_gap() -> None:
    result = correct("none", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.5]))
    assert result.weights is None
    assert result.log_ratio.tolist() == [0.0, 0.5]
    metrics = agreement_metrics(result.log_ratio)
    assert metrics["rollout_corr/exact"] == 0.5
    assert metrics["rollout_corr/log_ratio_abs_max"] == 0.5
    assert metrics["rollout_corr/log_ratio_abs_mean"] == 0.25
    assert metrics["rollout_corr/ratio_mean"] == pytest.approx((1 + math.exp(0.5)) / 2)


def test_equal_log_probs_weigh_exactly_one() -> None:
    log_prob = torch.randn(5)
    weights = correct("truncated", log_prob, log_prob.clone()).weights
    assert weights is not None
    assert weights.tolist() == [1.0] * 5


@pytest.mark.parametrize(("mode", "threshold", "message"), [("both", 2.0, "none, truncated"), ("none", 0.0, "above 0")])
def test_bad_settings_are_refused(mode: CorrectionMode, threshold: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correct(mode, torch.zeros(1), torch.zeros(1), threshold=threshold)
