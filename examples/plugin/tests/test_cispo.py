"""CISPO against its formula in NumPy: values and gradients, our code in float64 and in float32."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.algorithms.losses import PolicyRows, limits
from flowfleet.job.spec import AlgorithmPart
from flowfleet_example.losses import cispo
from tests.flowfleet.algorithms.numerics import PRECISIONS, as_float64, backward, close, gradient

NATS = 0.5


@PRECISIONS
@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(1, 6), num_elements=st.integers(1, 500), seed=st.integers(0, 2**31))
def test_value_and_gradient_match_the_formula(
    dtype: torch.dtype, tolerance: float, num_rows: int, num_elements: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    old, advantages, weights, moved = torch.tensor(rng.normal(size=(4, num_rows)), dtype=dtype)
    log_prob = (old + moved / num_elements).requires_grad_()
    rows = PolicyRows(log_prob, old, advantages, weights, mean=torch.zeros(num_rows, num_elements, dtype=dtype))
    output = cispo(rows, limits(AlgorithmPart(clip_nats=NATS), num_elements))
    backward(output.loss)

    joint = num_elements * (as_float64(log_prob) - as_float64(old))
    slope = -as_float64(weights) * np.minimum(np.exp(joint), math.exp(NATS)) * as_float64(advantages)
    close(output.loss, slope * as_float64(log_prob), tolerance)
    close(gradient(log_prob), slope, tolerance)
    clipped = output.stats.metrics()["actor/pg_clipfrac"]
    assert clipped == pytest.approx(np.mean(joint > NATS))


def test_an_on_policy_row_has_weight_one_whatever_its_size() -> None:
    log_prob = torch.tensor([-1.3], requires_grad=True)
    rows = PolicyRows(log_prob, log_prob.detach().clone(), torch.tensor([2.0]), mean=torch.zeros(1, 65_536))
    backward(cispo(rows, limits(AlgorithmPart(clip_nats=NATS), 65_536)).loss)
    assert gradient(log_prob).item() == -2.0
