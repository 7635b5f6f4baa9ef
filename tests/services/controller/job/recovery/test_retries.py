"""The table of what follows from a failed call."""

from __future__ import annotations

import grpc
import pytest

from services.controller.job.machine.command import (
    Command,
    EnsureTrainer,
    Generate,
    Publish,
    Score,
    TrainStep,
    Validate,
)
from services.controller.job.recovery.retries import MAX_FAILURES, FailureAction, decide

Code = grpc.StatusCode
TRAINER: list[Command] = [EnsureTrainer(), TrainStep(0), Publish(0)]
OTHERS: list[Command] = [Generate(0, (0,)), Score(0, 0), Validate(0)]


@pytest.mark.parametrize("command", TRAINER + OTHERS)
def test_a_wrong_request_fails_the_job_at_once(command: Command) -> None:
    assert decide(command, Code.INVALID_ARGUMENT, 1).action is FailureAction.FAIL_JOB


@pytest.mark.parametrize(
    "code", [Code.UNAVAILABLE, Code.FAILED_PRECONDITION, Code.RESOURCE_EXHAUSTED, Code.UNAUTHENTICATED]
)
def test_who_is_away_is_waited_for(code: grpc.StatusCode) -> None:
    full = [TrainStep(0)] if code is Code.RESOURCE_EXHAUSTED else []  # a disk: another trainer would meet the same
    for failures in (1, MAX_FAILURES, 10_000):
        others = [command for command in TRAINER if command not in full]
        assert {decide(command, code, failures).action for command in others} == {FailureAction.RESYNC}
        assert all(decide(command, code, failures).action is FailureAction.RETRY for command in full)
        assert {decide(command, code, failures).action for command in OTHERS} == {FailureAction.RETRY}


@pytest.mark.parametrize("code", [Code.INTERNAL, Code.DATA_LOSS, Code.DEADLINE_EXCEEDED, Code.NOT_FOUND])
def test_what_fails_again_and_again_is_given_up(code: grpc.StatusCode) -> None:
    assert decide(Score(0, 0), code, MAX_FAILURES - 1).action is FailureAction.RETRY
    assert decide(Score(0, 0), code, MAX_FAILURES).action is FailureAction.GIVE_UP
    hangs = code is Code.DEADLINE_EXCEEDED  # it would hang the second try as well
    assert decide(TrainStep(0), code, MAX_FAILURES - 1).action is (
        FailureAction.REPLACE if hangs else FailureAction.RESYNC
    )
    assert decide(TrainStep(0), code, MAX_FAILURES).action is FailureAction.FAIL_JOB


def test_delays_double_up_to_ten_seconds() -> None:
    delays = [decide(Score(0, 0), Code.UNAVAILABLE, failures).delay_s for failures in range(1, 10)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]
