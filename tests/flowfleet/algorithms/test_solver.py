"""DPM-Solver++ of second order against diffusers' scheduler, a float64 oracle, and the order that it promises."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from flowfleet.algorithms.samplers import mean_model_calls, model_calls, tail_length
from flowfleet.algorithms.sde import ode_step
from flowfleet.algorithms.solver import Prediction, dpm_solver_2_step, predict, tail_sigmas
from flowfleet.job.spec import parse_job

Velocity = Callable[[Any, float], Any]
MEAN, DEVIATION = 0.7, 0.8
"""Mean and std of the data of `flow`."""


def flow(x: Any, sigma: float) -> Any:
    """The exact velocity for normal data: dx/dsigma of x = (1 - sigma) x0 + sigma e."""
    variance = (1 - sigma) ** 2 * DEVIATION**2 + sigma**2
    x0 = MEAN + (1 - sigma) * DEVIATION**2 / variance * (x - (1 - sigma) * MEAN)
    return (x - x0) / sigma


def transported(x: Any, sigma: float, sigma_next: float) -> Any:
    """The exact end of x under `flow`: standardized values stay."""

    def deviation(level: float) -> float:
        return float(np.sqrt((1 - level) ** 2 * DEVIATION**2 + level**2))

    standard = (x - (1 - sigma) * MEAN) / deviation(sigma)
    return (1 - sigma_next) * MEAN + deviation(sigma_next) * standard


def shifted(times: Any, shift: float = 3.0) -> Any:
    return shift * times / (1 + (shift - 1) * times)


def sample(latents: Tensor, sigmas: Sequence[float], velocity: Velocity, *, second_order: bool = True) -> Tensor:
    before: Prediction | None = None
    for sigma, sigma_next in itertools.pairwise(sigmas):
        v = velocity(latents, sigma)
        now = predict(latents, v, sigma)
        if second_order:
            latents = dpm_solver_2_step(latents, v, sigma_next, now, before)
        else:
            latents = ode_step(latents, v, sigma, sigma_next)
        before = now
    return latents


def oracle(x: Any, sigmas: Sequence[float], velocity: Velocity) -> Any:
    """The paper's form of the multistep update, float64: alpha = 1 - sigma, lambda = log(alpha / sigma)."""
    kept: list[tuple[float, Any]] = []
    for s, t in itertools.pairwise(sigmas):
        kept.append((s, x - s * velocity(x, s)))
        data = kept[-1][1]
        with np.errstate(divide="ignore"):
            lambdas = [np.log((1 - np.float64(level)) / np.float64(level)) for level in (t, s)]
            h = lambdas[0] - lambdas[1]
            if len(kept) > 1 and t > 0:
                level, previous = kept[-2]
                r = (lambdas[1] - np.log((1 - np.float64(level)) / np.float64(level))) / h
                data = (1 + 1 / (2 * r)) * data - 1 / (2 * r) * previous
        x = t / s * x - (1 - t) * (np.exp(-h) - 1) * data
    return x


def wavy(x: Any, sigma: float) -> Any:
    """A velocity that is no normal data's, and that NumPy and torch compute alike."""
    return 1.3 * x - 0.4 * sigma + 0.2 * x * (1 - sigma) ** 2


@pytest.mark.parametrize("first", [1.0, 0.97])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 10, 25])
def test_steps_are_the_papers_in_float64(num_steps: int, first: float) -> None:
    sigmas = (first * shifted(np.linspace(1, 0, num_steps + 1))).tolist()
    x = np.random.default_rng(num_steps).normal(size=(3, 5, 7))
    ours = sample(torch.from_numpy(x), sigmas, wavy)
    np.testing.assert_allclose(ours.numpy(), oracle(x, sigmas, wavy), rtol=0, atol=1e-10)


@pytest.mark.parametrize("first", [1.0, None])
@pytest.mark.parametrize("num_steps", [2, 10, 20])
def test_steps_are_diffusers_on_the_same_sigmas(num_steps: int, first: float | None) -> None:
    """Its own flow sigmas begin at 0.9997; ours begin at 1 on request."""
    scheduler_class: Any = DPMSolverMultistepScheduler
    scheduler = scheduler_class(
        algorithm_type="dpmsolver++",
        solver_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
    )
    scheduler.set_timesteps(num_steps)
    if first is not None:
        scheduler.sigmas[0] = first
    start = latents = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    sigmas = scheduler.sigmas.tolist()
    for sigma, timestep in zip(sigmas, scheduler.timesteps, strict=False):
        latents = scheduler.step(wavy(latents, sigma), timestep, latents, return_dict=False)[0]
    torch.testing.assert_close(sample(start, sigmas, wavy), latents, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("second_order", "order"), [(False, 1), (True, 2)])
def test_the_error_falls_with_the_order_of_the_sampler(second_order: bool, order: int) -> None:
    """Compares levels at which the log signal-to-noise ratio is finite: to a half with Euler, to a quarter here."""
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    exact = transported(x, 0.95, 0.05)
    errors = []
    for num_steps in (40, 80, 160, 320):
        sigmas = np.linspace(0.95, 0.05, num_steps + 1).tolist()
        errors.append(float((sample(x, sigmas, flow, second_order=second_order) - exact).abs().max()))
    ratios = [coarse / fine for coarse, fine in itertools.pairwise(errors)]
    assert ratios == pytest.approx([2.0**order] * 3, rel=0.15)


def test_a_whole_schedule_is_more_exact_than_eulers() -> None:
    """The last step, to sigma 0, is of first order in both, and one as in diffusers' scheduler."""
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    sigmas = np.linspace(1, 0, 11).tolist()
    errors = [
        float((sample(x, sigmas, flow, second_order=kind) - transported(x, 1, 0)).abs().max()) for kind in (False, True)
    ]
    assert errors[1] < errors[0] / 10


def test_a_single_step_is_eulers_bit_for_bit() -> None:
    latents = torch.randn(2, 3, generator=torch.Generator().manual_seed(3))
    assert torch.equal(sample(latents, [1.0, 0.0], wavy), ode_step(latents, wavy(latents, 1.0), 1.0, 0.0))


def test_rows_do_not_depend_on_their_batch() -> None:
    latents = torch.randn(3, 4, generator=torch.Generator().manual_seed(4))
    sigmas = shifted(np.linspace(1, 0, 6)).tolist()
    assert torch.equal(sample(latents, sigmas, wavy)[1:2], sample(latents[1:2], sigmas, wavy))


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_a_tail_is_even_before_the_shift(shift: float) -> None:
    """MixGRPO-Flash: linspace from the time after the window to 0, then the schedule's shift."""
    base = shifted(np.linspace(1, 0, 26), shift).astype(np.float32)
    tail = tail_sigmas(float(base[4]), 1 - 4 / 25, 7)
    assert tail.dtype == torch.float32
    assert tail[0] == base[4]
    np.testing.assert_allclose(tail, shifted(np.linspace(1 - 4 / 25, 0, 8), shift), rtol=1e-6, atol=0)
    np.testing.assert_allclose(tail_sigmas(float(base[4]), 1 - 4 / 25, 21), base[4:], rtol=2e-6, atol=0)


def test_a_tail_has_no_more_steps_than_the_schedule_has_left() -> None:
    assert tail_length((0, 1, 2, 3), 25, 7) == 7
    assert tail_length((20, 21), 25, 7) == 3
    assert tail_length((24,), 25, 7) == 0
    assert tail_length((), 25, 7) == tail_length((3,), 25, None) == 0
    assert [model_calls(noisy, 25, 7) for noisy in ((0, 1, 2, 3), (20, 21), (24,), ())] == [11, 25, 25, 25]


def test_the_mean_of_model_calls_follows_the_windows() -> None:
    def calls(**rollout: Any) -> float:
        base = {"model": {"path": "m"}, "data": {"train": "p.txt"}, "rewards": {"ocr": {}}, "schedule": {"steps": 3}}
        return mean_model_calls(parse_job(base | {"algorithm": {"name": "mix_grpo"}, "rollout": rollout}))

    window = {"shift_every": 1}
    assert calls(num_inference_steps=25, window=window) == 25
    assert calls(num_inference_steps=25, window=window, tail_steps=7) == (4 + 7 + 5 + 7 + 6 + 7) / 3
