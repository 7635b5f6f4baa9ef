"""Clip ranges of videos, far below what float32 resolves around 1, from the reverse step to the surrogate."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flowfleet.algorithms.builtin.policy import FlowGrpoSettings
from flowfleet.algorithms.losses import PolicyRows, flow_grpo, grpo_guard, limits
from flowfleet.algorithms.sde import reverse_step
from tests.flowfleet.algorithms.numerics import Array, backward, gradient

VIDEO = 16 * 21 * 90 * 160
"""Latent elements of 81 frames at 1280×720."""
NATS = 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", [flow_grpo, grpo_guard], ids=lambda loss: loss.__name__)
def test_a_videos_rows_are_clipped_at_the_nats_that_were_set(loss: object, dtype: torch.dtype) -> None:
    """Log-ratios inside the range keep their whole gradient, those outside none, on both sides."""
    nats = torch.tensor([0.15, 0.15, 0.25, 0.25, -0.15, -0.15, -0.25, -0.25], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0] * 4, dtype=dtype)
    log_prob = (nats / VIDEO).to(dtype).requires_grad_()
    zeros = torch.zeros_like(log_prob)
    rows = PolicyRows(
        log_prob,
        zeros.detach(),
        advantages,
        mean=torch.zeros(8, 2, dtype=dtype),
        old_mean=torch.zeros(8, 2, dtype=dtype),
        std=torch.ones(8, dtype=dtype),
        dt=-torch.ones(8, dtype=dtype),
    )
    bounds = limits(FlowGrpoSettings(clip_nats=NATS), VIDEO)
    assert bounds.log_high * VIDEO == pytest.approx(NATS, rel=1e-9)
    assert bounds.log_low * VIDEO == pytest.approx(-NATS, rel=1e-6)
    output = loss(rows, bounds)  # type: ignore[operator]
    backward(output.loss)
    is_clipped = np.array([False, False, True, False, False, False, False, True])
    np.testing.assert_allclose(gradient(log_prob).numpy(), np.where(is_clipped, 0.0, -advantages), rtol=1e-6)
    metrics = output.stats.metrics()
    assert (metrics["actor/pg_clipfrac_higher"], metrics["actor/pg_clipfrac_lower"]) == (2 / 8, 2 / 8)


def test_limits_below_one_may_differ_from_those_above() -> None:
    bounds = limits(FlowGrpoSettings(clip_range=0.1, clip_range_low=0.3), 64)
    assert [math.exp(bounds.log_low), math.exp(bounds.log_high)] == pytest.approx([0.7, 1.1])


def test_log_probs_of_a_video_resolve_its_clip_range() -> None:
    """Two velocities whose joint log-ratio is a part of the clip range, against float64 NumPy on the same numbers."""
    rng = np.random.default_rng(0)
    sigma, sigma_next, eta = 0.7, 0.6, 0.7
    x, v, noise = (rng.normal(size=(1, VIDEO)).astype(np.float32) for _ in range(3))
    variance = eta**2 * sigma / (1 - sigma)
    dt = sigma_next - sigma
    std = math.sqrt(variance * -dt)
    of_x, of_v = 1 + variance * dt / (2 * sigma), (1 + variance * (1 - sigma) / (2 * sigma)) * dt

    def mean(velocity: NDArray[np.float32]) -> Array:
        return np.asarray(of_x * x.astype(np.float64) + of_v * velocity.astype(np.float64))

    sample = (mean(v) + std * noise).astype(np.float32)
    moved = (v + np.sign(noise) * np.float32(2e-6)).astype(np.float32)
    step = reverse_step("sde")
    log_probs = [
        step(
            torch.from_numpy(x),
            torch.from_numpy(velocity),
            sigma,
            sigma_next,
            eta=eta,
            sigma_max=0.95,
            prev_sample=torch.from_numpy(sample),
        ).log_prob
        for velocity in (v, moved)
    ]
    nats = (log_probs[1] - log_probs[0]).item() * VIDEO
    before, after = (((sample - mean(velocity)) ** 2).sum() / (2 * std**2) for velocity in (v, moved))
    assert abs(before - after) > NATS
    assert nats == pytest.approx(before - after, abs=0.01)
