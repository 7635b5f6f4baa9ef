"""Steps that are too coarse for their noise: which are refused, what they would do, and that no default reaches one."""

import math
from typing import Any

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfleet.algorithms.coarse import check_noise
from flowfleet.algorithms.sde import reverse_step
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.base import Schedule
from flowfleet.models.schedules import Levels, even_levels, flow_match_schedule, scheduler_levels
from tests.tiny_models.qwen_image import make_qwen_scheduler

TOKENS = 1024
"""Tokens of 512² pixels."""
QWEN = dict(make_qwen_scheduler().config)
SD3 = dict(FlowMatchEulerDiscreteScheduler(shift=3.0).config)
FLUX: dict[str, Any] = dict(FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True).config)
WAN = dict(FlowMatchEulerDiscreteScheduler(shift=5.0).config)
FAMILIES: dict[str, tuple[dict[str, Any], Levels]] = {
    "qwen": (QWEN, even_levels),
    "sd3": (SD3, scheduler_levels),
    "flux": (FLUX, even_levels),
    "wan": (WAN, even_levels),
}


def schedule_of(family: str, steps: int) -> Schedule:
    config, levels = FAMILIES[family]
    return flow_match_schedule(config, steps, TOKENS, levels=levels)


def spec_of(name: str = "flow_grpo", number: int = 10, eta: float | None = None, **window: Any) -> JobSpec:
    noise = {} if eta is None else {"eta": eta}
    return parse_job(
        {
            "model": {"path": "m"},
            "data": {"train": "t.txt"},
            "rewards": {"ocr": {}},
            "algorithm": {"name": name},
            "rollout": {"num_inference_steps": number, "noise": noise, "window": window},
        }
    )


def problem_of(family: str, spec: JobSpec) -> str:
    """Empty where the job is taken."""
    try:
        check_noise(spec, schedule_of(family, spec.rollout.num_inference_steps))
    except ValueError as error:
        return str(error)
    return ""


def test_dance_grpo_as_it_comes_never_meets_the_coarse_step_of_qwen_image() -> None:
    """Step 8 of 10 goes from .183 to .020 and would add 1.2 sqrt(.1633) = .485."""
    spec = spec_of("dance_grpo")
    drawn = {index for step in range(500) for index in spec.rollout.noise_window.noisy(spec.seed, step)}
    assert drawn == set(range(5))
    assert not problem_of("qwen", spec)
    problem = problem_of("qwen", spec_of("dance_grpo", high=9))
    assert problem.startswith("step 8 of 10 is too coarse for rollout.noise.type = dance_sde")
    assert "std 0.485" in problem
    assert "noise level 0.02," in problem
    assert "set rollout.window.high to at most 8" in problem
    assert f"rollout.noise.eta to at most {math.floor(100 * 0.08 / math.sqrt(0.1633)) / 100}" in problem
    assert problem.endswith("rollout.window.allow_coarse = true")


@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo"])
@pytest.mark.parametrize("family", ["qwen", "sd3"])
def test_all_steps_are_refused_unless_the_job_allows_it(name: str, family: str) -> None:
    assert "step 8 of 10" in problem_of(family, spec_of(name, strategy="all"))
    assert not problem_of(family, spec_of(name, strategy="all", high=8))
    assert not problem_of(family, spec_of(name, strategy="all", allow_coarse=True))
    assert not problem_of("wan", spec_of(name, strategy="all"))  # no short step at its end
    assert not problem_of(family, spec_of("flow_cps", strategy="all"))  # never more noise than the level
    assert not problem_of(family, spec_of("diffusion_nft", strategy="all"))  # an ODE


@pytest.mark.parametrize(
    ("window", "change"),
    [
        ({"strategy": "random", "high": 9}, "set rollout.window.high to at most 8"),
        ({"strategy": "progressive", "high": 9, "shift_every": 1000}, "set rollout.window.high to at most 8"),
        ({"strategy": "progressive", "high": 9, "stride": 4, "size": 1}, "set rollout.window.high to at most 8"),
        ({"strategy": "fixed", "low": 7}, "set rollout.window.high to at most 8"),
        ({"strategy": "fixed", "low": 8, "size": 1}, "move rollout.window.low"),
        ({"strategy": "listed", "steps": [0, 8]}, "leave it out of rollout.window.steps"),
        ({"strategy": "fraction"}, "set rollout.window.high to at most 8"),
    ],
)
def test_every_window_that_may_come_is_checked(window: dict[str, Any], change: str) -> None:
    problem = problem_of("qwen", spec_of(**window))
    assert problem.startswith("step 8 of 10")
    assert change in problem
    assert not problem_of("qwen", spec_of(allow_coarse=True, **window))


@pytest.mark.parametrize(
    "window",
    [
        {"strategy": "progressive", "high": 9, "stride": 3, "size": 1},  # starts 0, 3 and 6
        {"strategy": "listed", "steps": [0, 7]},
        {"strategy": "listed", "steps": [9]},  # ends at 0, where the job asked for noise by name
        {"strategy": "fixed", "low": 6},
    ],
)
def test_a_coarse_step_that_no_window_reaches_is_no_matter(window: dict[str, Any]) -> None:
    assert not problem_of("qwen", spec_of(**window))


def test_the_eta_that_is_named_is_enough() -> None:
    assert not problem_of("qwen", spec_of("dance_grpo", eta=0.19, high=9))
    assert problem_of("qwen", spec_of("dance_grpo", eta=0.2, high=9))


@settings(max_examples=150, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    steps=st.integers(4, 45),
    strategy=st.sampled_from(["random", "progressive"]),
    name=st.sampled_from(["flow_grpo", "dance_grpo"]),
)
def test_no_default_range_reaches_a_coarse_step(family: str, steps: int, strategy: str, name: str) -> None:
    """Takes the algorithm's own eta. From 46 steps on `progressive` of DanceGRPO's 1.2 does, and is refused."""
    assert not problem_of(family, spec_of(name, steps, strategy=strategy, size=2))
    if strategy == "random":
        assert not problem_of(family, spec_of(name, steps + 40, strategy=strategy, size=2))


def final_std(noisy: tuple[int, ...], *, data_std: float) -> float:
    """Std of samples on Qwen-Image's schedule by DanceGRPO's steps, if the data are Gaussian with `data_std`. The exact
    velocity is linear in x, so the variance goes from step to step in closed form."""
    schedule, variance = schedule_of("qwen", 10), 1.0
    for index in range(10):
        s, s_next = (float(schedule.sigmas[place].double()) for place in (index, index + 1))
        own = (1 - s) ** 2 * data_std**2 + s**2
        slope = (s - (1 - s) * data_std**2) / own
        eta = 1.2 if index in noisy else 0.0
        scales = reverse_step("dance_sde").scales(s, s_next, eta, schedule.sigma_max)
        factor = float(scales.latents + scales.velocity * slope)
        variance = factor**2 * variance + float(scales.std) ** 2
    return math.sqrt(variance)


def test_what_a_coarse_step_does_to_the_samples() -> None:
    """Along a direction in which the data hardly vary they end 23 times as wide as without noise; with noise in the
    default range at most a tenth wider."""
    plain = final_std((), data_std=0.1)
    assert final_std((7, 8), data_std=0.1) > 20 * plain
    for start in range(4):
        assert final_std((start, start + 1), data_std=0.1) == pytest.approx(plain, rel=0.1)
