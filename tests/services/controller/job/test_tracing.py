"""Which step's trace a command is in, and what its span tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from services.controller.job.machine.command import (
    Checkpoint,
    Command,
    ComputeAdvantages,
    EnsureTrainer,
    Export,
    Generate,
    Publish,
    Score,
    TrainStep,
    Validate,
)
from services.controller.job.machine.state_machine import Machine
from services.controller.job.tracing import step_of


def machine(version: int, steps: int) -> Machine:
    return cast(Machine, SimpleNamespace(state=SimpleNamespace(version=version), steps=steps))


@pytest.mark.parametrize(
    ("command", "step"),
    [
        (Generate(5, (0, 1)), 5),
        (Score(4, 2), 4),
        (ComputeAdvantages(4), 4),
        (TrainStep(4), 4),
        (Publish(4), 3),  # version 4 is what step 3 made
        (Checkpoint(4), 3),
        (Validate(4), 3),
        (Publish(0), 0),  # before the first step, which waits for it
        (Validate(10), 9),
        (EnsureTrainer(), 4),  # for the step that is next to train
    ],
)
def test_a_command_is_in_the_trace_of_the_step_that_it_works_for(command: Command, step: int) -> None:
    assert step_of(command, machine(version=4, steps=10)) == step


@pytest.mark.parametrize("command", [EnsureTrainer(), Export()])
def test_after_the_last_step_its_trace_goes_on(command: Command) -> None:
    assert step_of(command, machine(version=10, steps=10)) == 9


@pytest.mark.parametrize("command", [EnsureTrainer(), Publish(0), Validate(0), Export()])
def test_an_evaluation_has_one_trace(command: Command) -> None:
    assert step_of(command, machine(version=0, steps=0)) == 0
