"""Reverse steps against float64 NumPy oracles written from the published formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.algorithms.registry import STEPS
from flowfleet.algorithms.sde import StepResult, ode_step, reverse_step
from tests.flowfleet.algorithms.numerics import PRECISIONS, as_float64, backward, close, gradient
from tests.flowfleet.algorithms.step_oracle import SIGMAS, gaussian, oracle, oracle_gradient


def draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))  # type: ignore[return-value]


@st.composite
def cases(draw_from: st.DrawFn) -> dict[str, object]:
    batch = draw_from(st.integers(1, 4))
    inner = draw_from(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    rows = [draw_from(st.sampled_from(range(len(SIGMAS) - 1))) for _ in range(batch)]
    return {
        "name": draw_from(st.sampled_from(sorted(STEPS))),
        "shape": (batch, *inner),
        "rows": rows,
        "eta": draw_from(st.floats(0.05, 1.0)),
        "seed": draw_from(st.integers(0, 2**32)),
    }


@PRECISIONS
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_steps_match_the_oracle(dtype: torch.dtype, tolerance: float, case: dict[str, object]) -> None:
    name, shape, rows, eta = str(case["name"]), case["shape"], case["rows"], case["eta"]
    assert isinstance(shape, tuple)
    assert isinstance(rows, list)
    assert isinstance(eta, float)
    x, v, noise = draw(int(str(case["seed"])), shape, dtype)
    v.requires_grad_()
    s = torch.tensor([SIGMAS[i] for i in rows], dtype=dtype)
    s_next = torch.tensor([SIGMAS[i + 1] for i in rows], dtype=dtype)
    s_max = torch.tensor(SIGMAS[1], dtype=dtype)
    result = reverse_step(name)(x, v, s, s_next, eta=eta, sigma_max=s_max, noise=noise)
    backward(result.log_prob)
    assert result.prev_sample.dtype == result.mean.dtype == result.std.dtype == dtype
    assert result.log_prob.dtype == torch.float64
    for row in range(shape[0]):
        arguments = (s[row].item(), s_next[row].item(), eta, s_max.item())
        x_next, x_row, v_row = (as_float64(tensor[row]) for tensor in (result.prev_sample, x, v))
        mean, std, log_prob = (
            oracle(name, x_row, v_row, *arguments, x_next)
            if s_next[row] > 0 or name != "cps"
            else (x_row - arguments[0] * v_row, 0.0, 0.0)
        )
        close(result.mean[row], mean, tolerance, floor=1e-3)
        close(result.std[row], std, tolerance, floor=1e-3)
        close(result.prev_sample[row], mean + std * as_float64(noise[row]), tolerance, floor=1e-3)
        # The log-prob is a function of prev_sample - mean, whose rounding in float32 is relative to the sample.
        blur = (
            0.0 if dtype == torch.float64 or std == 0 else 1e-6 * np.abs(x_next).max() / (std if name != "cps" else 1)
        )
        assert result.log_prob[row].item() == pytest.approx(log_prob, rel=tolerance, abs=tolerance + 4 * blur)
        if std > 0:
            own_mean = as_float64(result.mean[row])
            same_mean = -((x_next - own_mean) ** 2).mean() if name == "cps" else gaussian(x_next, own_mean, std)
            assert result.log_prob[row].item() == pytest.approx(same_mean, rel=tolerance, abs=tolerance)
            expected = oracle_gradient(name, *arguments, own_mean, x_next)
            close(gradient(v)[row], expected, tolerance, floor=1e-3)
        else:
            assert gradient(v)[row].abs().max() == 0


@PRECISIONS
@pytest.mark.parametrize("i", [0, 4, 9])
def test_dance_sde_is_the_ode_plus_a_step_of_langevin_noise(dtype: torch.dtype, tolerance: float, i: int) -> None:
    """Another way to the same: the score is that of the noise, -x1 / s, and each step adds half the noise's variance of
    it. At sigma 1 and at the last step, whose noise stays in the sample, as anywhere else."""
    x, v, noise = draw(7 + i, (1, 6), dtype)
    s, s_next, eta = SIGMAS[i], SIGMAS[i + 1], 1.2
    result = reverse_step("dance_sde")(x, v, s, s_next, eta=eta, sigma_max=SIGMAS[1], noise=noise)
    variance = eta**2 * (s - s_next)
    euler = as_float64(x) + (s_next - s) * as_float64(v)
    mean = euler - variance / 2 * (as_float64(x) + (1 - s) * as_float64(v)) / s
    close(result.mean, mean, tolerance)
    close(result.std, math.sqrt(variance), tolerance)
    # A deviation of exactly std * noise has a log-prob that does not depend on where the mean is.
    expected = gaussian(math.sqrt(variance) * as_float64(noise), np.zeros((1, 6)), math.sqrt(variance))
    assert result.log_prob.item() == pytest.approx(expected, rel=10 * tolerance)


def test_step_std_of_flow_grpo_at_the_published_check_values() -> None:
    x, v, noise = draw(0, (1, 3), torch.float32)
    stds = [
        reverse_step("sde")(x, v, SIGMAS[i], SIGMAS[i + 1], eta=1.2, sigma_max=SIGMAS[1], noise=noise).std.item()
        for i in range(6)
    ]
    assert stds == pytest.approx([1.2, 1.2080, 0.8370, 0.6645, 0.5533, 0.4679], abs=5e-5)


def evaluate(name: str, result: StepResult, x: torch.Tensor, v: torch.Tensor, i: int, eta: float) -> StepResult:
    return reverse_step(name)(
        x, v, SIGMAS[i], SIGMAS[i + 1], eta=eta, sigma_max=SIGMAS[1], prev_sample=result.prev_sample
    )


@pytest.mark.parametrize("name", sorted(STEPS))
@pytest.mark.parametrize("i", range(len(SIGMAS) - 1))
def test_trainer_recomputes_the_rollouts_log_prob_bit_for_bit(name: str, i: int) -> None:
    x, v, noise = draw(i, (5, 16, 64), torch.float32)
    rollout = reverse_step(name)(x, v, SIGMAS[i], SIGMAS[i + 1], eta=0.7, sigma_max=SIGMAS[1], noise=noise)
    trainer = evaluate(name, rollout, x, v.clone().requires_grad_(), i, 0.7)
    assert torch.equal(trainer.log_prob.detach(), rollout.log_prob)
    assert torch.equal((trainer.log_prob - rollout.log_prob).exp().detach(), torch.ones(5))


@pytest.mark.parametrize("name", sorted(STEPS))
def test_rows_of_different_windows_share_a_batch(name: str) -> None:
    x, v, noise = draw(1, (3, 16, 64), torch.float32)
    indices = [0, 4, 2]
    s = torch.tensor([SIGMAS[i] for i in indices])
    s_next = torch.tensor([SIGMAS[i + 1] for i in indices])
    s_max = torch.tensor(SIGMAS[1])
    together = reverse_step(name)(x, v, s, s_next, eta=0.7, sigma_max=s_max, noise=noise)
    for row in range(3):
        one = slice(row, row + 1)
        alone = reverse_step(name)(x[one], v[one], s[row], s_next[row], eta=0.7, sigma_max=s_max, noise=noise[one])
        for field in ("prev_sample", "mean", "std", "log_prob"):
            assert torch.equal(getattr(together, field)[one], getattr(alone, field)), field


@pytest.mark.parametrize("name", sorted(STEPS))
@pytest.mark.parametrize("i", [0, 5, 9])
def test_eta_zero_is_the_ode_step(name: str, i: int) -> None:
    x, v, _ = draw(2, (2, 7), torch.float32)
    result = reverse_step(name)(x, v, SIGMAS[i], SIGMAS[i + 1], eta=0.0, sigma_max=SIGMAS[1])
    assert torch.equal(result.prev_sample, ode_step(x, v, SIGMAS[i], SIGMAS[i + 1]))
    assert torch.equal(result.mean, result.prev_sample)
    assert torch.equal(result.std, torch.zeros(2))
    assert torch.equal(result.log_prob, torch.zeros(2))


def test_last_cps_step_has_no_noise_and_predicts_the_clean_sample() -> None:
    x, v, noise = draw(3, (2, 7), torch.float64)
    result = reverse_step("cps")(x, v, 0.02, 0.0, eta=0.8, sigma_max=0.9, noise=noise)
    torch.testing.assert_close(result.prev_sample, x - 0.02 * v, rtol=1e-12, atol=1e-12)
    assert torch.equal(result.log_prob, torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("name", sorted(STEPS))
def test_steps_keep_the_marginal_of_a_point_mass(name: str) -> None:
    """If all data is 0 and the velocity is the exact x / s, then x at s is N(0, s^2); a short step must give N(0,
    s'^2)."""
    generator = torch.Generator().manual_seed(4)
    s, s_next = 0.6, 0.599
    x = s * torch.randn(1, 400_000, generator=generator, dtype=torch.float64)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    result = reverse_step(name)(x, x / s, s, s_next, eta=0.7, sigma_max=0.9, noise=noise)
    sampling_error = s_next * math.sqrt(2 / x.numel()) / math.sqrt(2)
    second_order = (s - s_next) ** 2 * 20
    assert result.prev_sample.std().item() == pytest.approx(s_next, abs=5 * sampling_error + second_order)


def test_bfloat16_velocity_is_taken_into_the_latents_dtype() -> None:
    x, v, noise = draw(5, (2, 8), torch.float32)
    half = v.bfloat16()
    result = reverse_step("sde")(x, half, 0.5, 0.4, eta=0.7, sigma_max=0.9, noise=noise)
    expected = reverse_step("sde")(x, half.float(), 0.5, 0.4, eta=0.7, sigma_max=0.9, noise=noise)
    assert torch.equal(result.prev_sample, expected.prev_sample)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigma": 1.5}, "0 <= sigma_next < sigma <= 1"),
        ({"sigma_next": 0.5}, "0 <= sigma_next < sigma <= 1"),
        ({"sigma_next": -0.1}, "0 <= sigma_next < sigma <= 1"),
        ({"sigma": 1.0, "sigma_max": 1.0}, "sigma_max < 1 where sigma is 1"),
        ({"sigma": torch.tensor([0.5, 0.4, 0.45])}, "one sigma or one a row"),
        ({"eta": -1.0}, "eta must be at least 0"),
        ({"noise": None}, "needs noise"),
        ({"noise": torch.zeros(2, 4)}, "noise has shape"),
        ({"prev_sample": torch.zeros(2, 3)}, "not both"),
        ({"latents": torch.zeros(2, 3, dtype=torch.bfloat16)}, "latents must be float32"),
    ],
)
def test_bad_input_is_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"latents": torch.zeros(2, 3), "velocity": torch.zeros(2, 3), "sigma": 0.5}
    arguments |= {"sigma_next": 0.3, "eta": 0.7, "sigma_max": 0.9, "noise": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match=message):
        reverse_step("sde")(**(arguments | change))  # type: ignore[arg-type]


def test_cps_refuses_eta_above_one() -> None:
    x, v, noise = draw(6, (1, 2), torch.float32)
    with pytest.raises(ValueError, match=r"eta in \[0, 1\].*rollout\.noise\.eta"):
        reverse_step("cps")(x, v, 0.5, 0.4, eta=1.2, sigma_max=0.9, noise=noise)
