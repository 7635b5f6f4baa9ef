"""What a job file may name exists."""

from functools import reduce

import pytest

from flowfleet.algorithms.registry import ALGORITHMS, LOSSES, STEPS, Step, register_step
from flowfleet.algorithms.sde import reverse_step
from flowfleet.job import spec as jobs


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_registered_step_can_be_imported(name: str) -> None:
    step = reverse_step(name)
    assert (step.name, step.is_gaussian) == (name, STEPS[name].is_gaussian)
    assert callable(step.formula)


def test_a_step_that_no_one_registered_is_refused_and_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match=r"'sdee' is not one of .*; did you mean sde"):
        jobs.NoisePart(type="sdee")
    with pytest.raises(ValueError, match="a step named sde is registered already"):
        register_step(Step("sde", "elsewhere:sde_scales"))


def test_every_algorithm_names_a_step_that_exists() -> None:
    named = {algorithm.defaults.get("rollout.noise.type", "sde") for algorithm in ALGORITHMS.values()}
    assert named <= set(STEPS)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_registered_loss_can_be_imported(name: str) -> None:
    assert callable(LOSSES[name].load())


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_setting_that_a_loss_sets_exists(name: str) -> None:
    for setting in LOSSES[name].defaults:
        part, *path = setting.split(".")
        reduce(getattr, path, jobs.JobSpec.model_fields[part].default)
