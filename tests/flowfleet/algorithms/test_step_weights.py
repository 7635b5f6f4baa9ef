"""TempFlow-GRPO's weights against the formula, and against the constants that its authors' code multiplies by."""

from typing import Any

import numpy as np
import pytest
import torch

from flowfleet.algorithms.step_weights import step_weights
from flowfleet.job.spec import JobSpec, parse_job
from flowfleet.models.base import Schedule


def spec_of(num_steps: int = 10, eta: float = 0.7, **window: Any) -> JobSpec:
    return parse_job(
        {
            "model": {"path": "m"},
            "data": {"train": "prompts.txt"},
            "rewards": {"ocr": {}},
            "algorithm": {"step_weights": "noise"},
            "rollout": {"num_inference_steps": num_steps, "noise": {"eta": eta}, "window": window},
        }
    )


def shifted(values: np.ndarray, shift: float) -> np.ndarray:
    return shift * values / (1 + (shift - 1) * values)


def schedule_of(sigmas: np.ndarray) -> Schedule:
    tensor = torch.tensor([*sigmas, 0.0], dtype=torch.float32)
    return Schedule(1000 * tensor[:-1], tensor)


def sde_stds(sigmas: np.ndarray, eta: float) -> np.ndarray:
    """eta sqrt(s / (1 - s)) sqrt(-dt), with the second level for s = 1."""
    inner = np.where(sigmas[:-1] == 1, sigmas[1], sigmas[:-1])
    return eta * np.sqrt(sigmas[:-1] / (1 - inner)) * np.sqrt(sigmas[:-1] - sigmas[1:])


@pytest.mark.parametrize("window", [{"strategy": "random", "high": 6}, {"strategy": "listed", "steps": [0, 3, 4]}])
def test_a_step_weighs_as_its_std_over_the_mean_of_all_that_may_carry_noise(window: dict[str, Any]) -> None:
    sigmas = np.linspace(1, 0.1, 10)
    reachable = window.get("steps") or list(range(6))
    stds = sde_stds(np.append(sigmas, 0.0), 0.7)[reachable]
    weights = step_weights(spec_of(**window), schedule_of(sigmas))
    assert list(weights) == reachable
    assert list(weights.values()) == pytest.approx(list(stds / stds.mean()), rel=1e-6)
    assert np.mean(list(weights.values())) == pytest.approx(1.0)


def test_the_weights_of_sd35_are_those_of_the_authors_code() -> None:
    """They multiply by 2.25 times the std: its mean over the noisy steps of ten, shift 3, eta 0.7, is 1 / 2.25."""
    least = shifted(np.array(1e-3), 3.0)
    sigmas = shifted(np.linspace(1.0, least, 10), 3.0)  # as diffusers' FlowMatchEulerDiscreteScheduler, shifted twice
    stds = sde_stds(np.append(sigmas, 0.0), 0.7)
    weights = step_weights(spec_of(strategy="all"), schedule_of(sigmas))
    assert [weights[index] for index in range(9)] == pytest.approx(list(2.25 * stds[:9]), rel=2e-3)


def test_without_weights_every_step_counts_one() -> None:
    spec = spec_of(strategy="all")
    plain = spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update={"step_weights": "uniform"})})
    assert step_weights(plain, schedule_of(np.linspace(1, 0.1, 10))) == dict.fromkeys(range(9), 1.0)
