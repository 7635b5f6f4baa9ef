"""Noise of the matching losses: from the seed and the sample alone, by the law that the job names, and on one side of
two experts' boundary."""

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.models.base import ModelAdapter
from flowfleet.models.registry import adapter_for
from services.trainer.step.objectives.draws import ContinuousDraws, Draws, Interval, ScheduleDraws, draws_of
from tests.services.trainer.steps import make_spec
from tests.tiny_models import make_tiny

LEVELS = (0.02, 0.98)
PLACES = [(group, number) for group in range(40) for number in range(50)]
BOUNDARY = 0.875
"""Boundary of Wan2.2 T2V A14B; its tiny stand-in has a shift of 5."""


def uniform(seed: int, step: int, levels: Interval = LEVELS, boundary: float | None = None) -> Draws:
    return ContinuousDraws(seed, step, boundary, levels, np.array(levels))


def shifted(seed: int, step: int, shift: float = 5.0, boundary: float | None = None) -> Draws:
    u = np.linspace(0, 1, 1001)
    return ContinuousDraws(seed, step, boundary, LEVELS, shift * u / (1 + (shift - 1) * u))


def scheduled(seed: int, step: int, steps: int = 10, boundary: float | None = None) -> ScheduleDraws:
    u = torch.linspace(1, 1 / steps, steps)
    return ScheduleDraws(seed, step, boundary, 5 * u / (1 + 4 * u), num_rounds=steps)


laws = pytest.mark.parametrize("make", [uniform, shifted, scheduled])


@laws
def test_no_batch_or_order_changes_a_rows_draws(make: Any) -> None:
    draws = make(7, 3)
    places = PLACES[:6]
    sigmas, noise = draws.sigmas(places, 0, 1), draws.noise(places, 1, (4, 8))
    assert sigmas.dtype == torch.float32
    for row in (5, 2):
        assert torch.equal(draws.sigmas([places[row]], 0, 1)[0], sigmas[row])
        assert torch.equal(draws.noise([places[row]], 1, (4, 8))[0], noise[row])
    assert torch.equal(draws.sigmas(places, 1, 1), sigmas)  # nor does the update, with one expert


@pytest.mark.parametrize("make", [uniform, shifted])
@pytest.mark.parametrize("other", [(8, 3), (7, 4)], ids=["seed", "step"])
def test_seed_step_place_and_round_all_matter(make: Any, other: tuple[int, int]) -> None:
    draws, changed, places = make(7, 3), make(*other), PLACES[:4]
    for sigmas in (changed.sigmas(places, 0, 0), draws.sigmas(places, 0, 1), draws.sigmas(PLACES[4:8], 0, 0)):
        assert not torch.isclose(sigmas, draws.sigmas(places, 0, 0)).any()
    for noise in (changed.noise(places, 0, (8,)), draws.noise(places, 1, (8,)), draws.noise(PLACES[4:8], 0, (8,))):
        assert not torch.isclose(noise, draws.noise(places, 0, (8,))).all()


def test_uniform_levels_are_uniform_and_noise_is_standard() -> None:
    """Five standard errors of 2,000 draws."""
    draws, count = uniform(1, 0), len(PLACES)
    sigmas, width = draws.sigmas(PLACES, 0, 0).double(), LEVELS[1] - LEVELS[0]
    assert LEVELS[0] <= sigmas.min() < LEVELS[0] + 0.01
    assert LEVELS[1] - 0.01 < sigmas.max() <= LEVELS[1]
    assert sigmas.mean().item() == pytest.approx(0.5, abs=5 * width / math.sqrt(12 * count))
    noise = draws.noise(PLACES, 0, (5,)).double()
    assert noise.mean().item() == pytest.approx(0.0, abs=5 / math.sqrt(noise.numel()))
    assert noise.var().item() == pytest.approx(1.0, abs=5 * math.sqrt(2 / noise.numel()))


@pytest.mark.parametrize("boundary", [None, 0.3, BOUNDARY])
@pytest.mark.parametrize("shift", [1.0, 5.0, 12.0])
def test_shifted_levels_have_the_samplers_quantiles(shift: float, boundary: float | None) -> None:
    """P(sigma <= Q(u)) = u at nine u, with five standard errors. With a boundary one row of many steps, for the rows of
    a round lie on one side."""
    draws = [shifted(1, step, shift, boundary) for step in range(1 if boundary is None else 4000)]
    sigmas = torch.cat([draw.sigmas(PLACES if boundary is None else PLACES[:1], 0, 0) for draw in draws]).double()
    assert LEVELS[0] - 1e-7 <= sigmas.min() <= sigmas.max() <= LEVELS[1] + 1e-7
    for u in np.linspace(0.1, 0.9, 9):
        quantile = shift * u / (1 + (shift - 1) * u)
        if LEVELS[0] < quantile < LEVELS[1]:
            share = float((sigmas <= quantile).double().mean())
            assert share == pytest.approx(u, abs=5 * math.sqrt(u * (1 - u) / len(sigmas)))


@pytest.mark.parametrize("make", [uniform, shifted, scheduled])
@settings(max_examples=40, deadline=None)
@given(boundary=st.floats(0.01, 0.99), seed=st.integers(0, 2**63 - 1), update=st.integers(0, 3))
def test_all_rows_of_a_round_lie_on_one_side(make: Any, boundary: float, seed: int, update: int) -> None:
    """The comparison is the adapter's: float32 timesteps with the boundary."""
    draws = make(seed, 0, boundary=boundary)
    for k in range(3):
        sigmas = draws.sigmas(PLACES[:50], update, k)
        high = 1000 * sigmas >= boundary * 1000
        assert bool(high.all()) or not bool(high.any())
        start, end = draws.interval(update, k)
        assert start - 1e-7 <= sigmas.min() <= sigmas.max() <= end + 1e-7
        assert (start * 1000 >= boundary * 1000) == bool(high.all())


@given(
    boundary=st.floats(0.01, 0.99), low=st.floats(0.01, 0.98), width=st.floats(0.005, 0.97), seed=st.integers(0, 2**31)
)
def test_bounds_on_one_side_of_the_boundary_or_around_it(boundary: float, low: float, width: float, seed: int) -> None:
    levels = low, min(0.99, low + width)
    draws = uniform(seed, 0, levels, boundary)
    start, end = draws.interval(0, 0)
    assert levels[0] - 1e-6 <= start <= end <= levels[1] + 2e-6
    assert (start > boundary) == (end > boundary)


def test_a_side_is_as_likely_as_its_share() -> None:
    """Five standard errors of 3,000 draws, a share of 0.3 being above the boundary."""
    draws = [uniform(1, step, (0.0, 1.0), 0.7) for step in range(500)]
    intervals = [draw.interval(update, k) for draw in draws for update in range(2) for k in range(3)]
    share = sum(start > 0.7 for start, _ in intervals) / len(intervals)
    assert share == pytest.approx(0.3, abs=5 * math.sqrt(0.3 * 0.7 / len(intervals)))


@pytest.mark.parametrize("levels", [(0.02, 0.8), (0.9, 0.98)])
def test_levels_on_one_side_always_are_that_side(levels: Interval) -> None:
    assert {uniform(1, step, levels, 0.85).interval(0, 0) for step in range(20)} == {levels}


def test_a_sample_sees_the_samplers_levels_each_once_in_its_own_order() -> None:
    draws = scheduled(1, 0, 10)
    rounds = torch.stack([draws.sigmas(PLACES[:200], 0, k) for k in range(10)], 1)
    for row in rounds:
        assert sorted(row.tolist(), reverse=True) == draws.sigmas_of_steps.tolist()
    assert len({tuple(row) for row in rounds.tolist()}) > 190
    counts = Counter(scheduled(1, step).sigmas(PLACES[:1], 0, 0).item() for step in range(4000))
    assert all(abs(counts[level] - 400) < 5 * math.sqrt(4000 * 0.1 * 0.9) for level in draws.sigmas_of_steps.tolist())


def test_with_two_experts_the_samplers_levels_come_side_by_side() -> None:
    """Ten levels, five of them the high-noise expert's: five rounds of ten, and each level once, in every update."""
    draws = scheduled(1, 0, 10, BOUNDARY)
    orders = set()
    for update in range(6):
        rounds = torch.stack([draws.sigmas(PLACES[:50], update, k) for k in range(10)], 1)
        is_high = rounds[0] >= BOUNDARY
        assert int(is_high.sum()) == 5
        assert bool(((rounds >= BOUNDARY) == is_high).all())
        for row in rounds:
            assert sorted(row.tolist(), reverse=True) == draws.sigmas_of_steps.tolist()
        orders.add(tuple(is_high.tolist()))
    assert len(orders) > 1


@pytest.mark.parametrize("boundary", [None, BOUNDARY])
def test_each_pass_has_the_samplers_levels_in_an_order_of_its_own(boundary: float | None) -> None:
    """Six rounds of ten levels a pass: none twice in a pass, and the second pass goes beyond the ten."""
    levels = scheduled(1, 0, 10).sigmas_of_steps
    draws = ScheduleDraws(1, 0, boundary, levels, num_rounds=6)
    passes = [torch.stack([draws.sigmas(PLACES[:50], 0, 6 * n + k) for k in range(6)], 1) for n in range(3)]
    for rounds in passes:
        assert all(len(set(row)) == 6 and set(row) <= set(levels.tolist()) for row in rounds.tolist())
    assert not torch.equal(passes[0], passes[1])
    assert not torch.equal(passes[1], passes[2])


# On the model's own schedule ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("wan_two_experts", tmp_path_factory.mktemp("wan") / "model")


def high_share(folder: Path, adapter: ModelAdapter, sampling: str, shift: float | None, rounds: int) -> float:
    """Share of the rounds of 400 steps that go through the high-noise expert."""
    spec = make_spec(
        folder,
        algorithm={"name": "diffusion_nft", "sigma_sampling": sampling, "num_noise_levels": rounds},
        rollout={"num_frames": 5, "num_inference_steps": 10, "shift": shift},
    )
    draws = [draws_of(spec, adapter, step) for step in range(400)]
    intervals = [draw.interval(0, k) for draw, k in itertools.product(draws, range(rounds))]
    return sum(start >= BOUNDARY for start, _ in intervals) / len(intervals)


@pytest.mark.parametrize("shift", [None, 8.0, 12.0])
def test_the_high_noise_expert_is_trained_as_often_as_it_samples(two_experts: Path, shift: float | None) -> None:
    """The boundary of A14B: s u / (1 + (s - 1) u) >= 0.875 for u from 0.583 on with s = 5. Uniform levels reach it in
    one round of nine, where the sampler spends five of ten steps."""
    adapter = adapter_for(str(two_experts)).load(two_experts, dtype=torch.float32, components=("transformer",))
    size = make_spec(two_experts, rollout={"num_frames": 5}).rollout.size
    timesteps = adapter.schedule(10, size, shift).timesteps
    sampled = sum(adapter.expert(timestep) is adapter.transformer for timestep in timesteps) / 10
    assert sampled == {None: 0.5, 8.0: 0.6, 12.0: 0.7}[shift]
    assert high_share(two_experts, adapter, "schedule", shift, 10) == sampled
    s = shift or 5.0
    expected = 1 - BOUNDARY / (s - (s - 1) * BOUNDARY)
    error = 5 * math.sqrt(expected * (1 - expected) / 1600)
    assert high_share(two_experts, adapter, "shifted", shift, 4) == pytest.approx(expected, abs=error)
    fine = adapter.schedule(1000, size, shift).sigmas[:-1]
    assert float((fine >= BOUNDARY).double().mean()) == pytest.approx(expected, abs=2e-3)
    old = high_share(two_experts, adapter, "uniform", shift, 4)
    assert old == pytest.approx((0.98 - BOUNDARY) / 0.96, abs=5 * math.sqrt(0.11 * 0.89 / 1600))
