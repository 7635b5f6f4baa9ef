"""DiffusionOPD against a float64 oracle: the KL of two Gaussians, element by element."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.algorithms.distillation import DistillationRows, diffusion_opd
from flowfleet.algorithms.settings import DistillationSettings
from tests.flowfleet.algorithms.matching.test_losses import SHAPES
from tests.flowfleet.algorithms.numerics import PRECISIONS, Array, backward, close, gradient, per_row, row_mean

PART = DistillationSettings()


def opd_oracle(mean: Array, teacher: Array, std: Array) -> tuple[Array, Array]:
    """Loss (B,) and its gradient in the policy's mean. The KL of N(m, s²) to N(t, s²) is log(s/s) + (s² + (m − t)²) /
    (2 s²) − ½; without noise half the squared distance of the means takes its place."""
    gap, spread = mean - teacher, per_row(std, mean)
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = (spread**2 + gap**2) / (2 * spread**2) - 0.5
        slope = gap / spread**2
    loss = np.where(std > 0, row_mean(kl), row_mean(gap**2) / 2)
    return loss, np.where(spread > 0, slope, gap) / mean[0].size


@PRECISIONS
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 6), inner=SHAPES, some_without=st.booleans())
def test_it_is_the_kl_of_each_step(
    dtype: torch.dtype, tolerance: float, seed: int, rows: int, inner: list[int], some_without: bool
) -> None:
    generator = np.random.default_rng(seed)
    mean = generator.normal(size=(rows, *inner))
    teacher = mean + generator.normal(size=mean.shape)
    std = generator.uniform(0.05, 1.0, size=rows)
    if some_without:
        std[::2] = 0.0
    own, other, spread = (torch.tensor(values, dtype=dtype) for values in (mean, teacher, std))
    own.requires_grad_(True)
    other.requires_grad_(True)
    exact = [np.asarray(value.detach().double().numpy()) for value in (own, other, spread)]
    loss, slope = opd_oracle(*exact)
    output = diffusion_opd(DistillationRows(own, other, spread), PART)
    backward(output.loss)
    close(output.loss, loss, tolerance)
    close(gradient(own), slope, tolerance)
    close(output.sums["actor/teacher_kl"], loss.sum(), tolerance)
    assert other.grad is None  # a teacher learns nothing
    assert not output.sums["actor/teacher_kl"].requires_grad


def test_a_policy_that_is_its_teacher_has_nothing_to_learn() -> None:
    mean = torch.randn(3, 4, 2, requires_grad=True)
    output = diffusion_opd(DistillationRows(mean, mean.detach().clone(), torch.tensor([0.0, 0.3, 1.0])), PART)
    backward(output.loss)
    assert output.loss.tolist() == [0.0, 0.0, 0.0]
    assert not gradient(mean).any()
