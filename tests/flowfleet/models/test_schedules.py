"""Schedules: the published check values, and equality in bits with what diffusers' pipeline samples with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.models.registry import adapter_for
from flowfleet.models.schedules import Levels, even_levels, flow_match_schedule, scheduler_levels, shifted_schedule
from flowfleet.models.settings import Size
from tests.tiny_models import make_tiny
from tests.tiny_models.qwen_image import make_qwen_scheduler

CONFIG = dict(make_qwen_scheduler().config)
# 512x512 (1024 tokens), 10 steps.
CHECK_SIGMAS = [1, 0.92897, 0.85148, 0.76662, 0.67328, 0.57012, 0.45550, 0.32740, 0.18330, 0.02, 0]


def test_check_values_of_qwen_image_at_512() -> None:
    schedule = flow_match_schedule(CONFIG, 10, 1024)
    assert schedule.sigmas.tolist() == pytest.approx(CHECK_SIGMAS, abs=5e-6)
    assert schedule.sigma_max.item() == schedule.sigmas[1].item()
    assert (schedule.num_steps, schedule.sigmas.dtype, schedule.timesteps.dtype) == (10, torch.float32, torch.float32)
    torch.testing.assert_close(schedule.timesteps, schedule.sigmas[:-1] * 1000, rtol=0, atol=0)


@settings(max_examples=40, deadline=None)
@given(num_steps=st.integers(2, 60), tokens=st.integers(1, 16_384))
def test_schedules_match_the_formula_in_float64(num_steps: int, tokens: int) -> None:
    mu = 0.5 + (tokens - 256) * (0.9 - 0.5) / (8192 - 256)
    flat = np.linspace(1, 1 / num_steps, num_steps)
    shifted = np.exp(mu) / (np.exp(mu) + (1 / flat - 1))
    stretched = 1 - (1 - shifted) / ((1 - shifted[-1]) / (1 - 0.02))
    schedule = flow_match_schedule(CONFIG, num_steps, tokens)
    np.testing.assert_allclose(schedule.sigmas, np.append(stretched, 0.0), atol=5e-7)
    again = flow_match_schedule(CONFIG, num_steps, tokens)
    assert torch.equal(again.sigmas, schedule.sigmas)
    assert torch.equal(again.timesteps, schedule.timesteps)


@pytest.mark.parametrize(("num_steps", "message"), [(0, "at least 1"), (-3, "at least 1"), (1, "use more steps")])
def test_step_numbers_without_a_schedule_are_refused(num_steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flow_match_schedule(CONFIG, num_steps, 1024)


def test_one_step_works_without_a_terminal_shift() -> None:
    schedule = flow_match_schedule(CONFIG | {"shift_terminal": None}, 1, 1024)
    assert schedule.sigmas.tolist() == [1.0, 0.0]


STATIC = dict(FlowMatchEulerDiscreteScheduler(shift=3.0).config)


@pytest.mark.parametrize("config", [CONFIG, STATIC], ids=["dynamic, with a terminal sigma", "static"])
@pytest.mark.parametrize("shift", [1.0, 3.0, 7.5])
def test_a_jobs_shift_takes_the_place_of_the_checkpoints(config: dict[str, Any], shift: float) -> None:
    u = np.linspace(1, 1 / 16, 16)
    schedule = flow_match_schedule(config, 16, 1024, shift=shift)
    np.testing.assert_allclose(schedule.sigmas, np.append(shift * u / (1 + (shift - 1) * u), 0.0), rtol=1e-6)
    assert torch.equal(schedule.timesteps, 1000 * schedule.sigmas[:-1])
    other_size = flow_match_schedule(config, 16, 64, shift=shift)
    assert torch.equal(schedule.sigmas, other_size.sigmas)


def test_the_checkpoints_own_shift_changes_nothing_at_even_levels() -> None:
    own = flow_match_schedule(STATIC, 10, 1024)
    assert torch.equal(flow_match_schedule(STATIC, 10, 1024, shift=3.0).sigmas, own.sigmas)


@pytest.mark.parametrize("levels", [even_levels, scheduler_levels])
@pytest.mark.parametrize("config", [CONFIG, {"shift": 3.0}, {"shift": 1.0}])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_jobs_shift_is_applied_once_whatever_the_scheduler_says(
    shift: float, config: dict[str, Any], levels: Levels
) -> None:
    """The last of ten levels at a shift of 3 is 3 · 0.1 / 1.2 = 0.25, as Flow-DPPO's authors train it on SD3.5."""
    even = np.linspace(1, 0.1, 10)
    schedule = flow_match_schedule(config, 10, 1024, shift=shift, levels=levels)
    np.testing.assert_allclose(schedule.sigmas[:-1], shift * even / (1 + (shift - 1) * even), rtol=1e-6)


@pytest.mark.parametrize("kind", ["stable_diffusion_3", "flux", "z_image", "wan_5b", "bagel", "hunyuan_image3"])
def test_a_jobs_shift_means_the_same_in_every_family(kind: str, tmp_path: Path) -> None:
    path = make_tiny(kind, tmp_path / "model")
    adapter = adapter_for(path).load(path, dtype=torch.float32, components=(), load_format="empty")
    sigmas = adapter.schedule(10, Size(32, 32), 3.0).sigmas
    np.testing.assert_allclose(sigmas[-2], 0.25, rtol=1e-6)
    np.testing.assert_allclose(sigmas, shifted_schedule(10, 3.0).sigmas, rtol=1e-6, atol=1e-7)
