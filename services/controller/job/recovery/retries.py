"""Decides what follows when a command's remote call fails: a pure table, to be read and tested without a network."""

from dataclasses import dataclass
from enum import StrEnum

import grpc

from flowfleet.backoff import backoff_s
from services.controller.job.machine.command import Checkpoint, Command, EnsureTrainer, Export, Publish, TrainStep

Code = grpc.StatusCode

PERMANENT = frozenset({Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED, Code.PERMISSION_DENIED, Code.OUT_OF_RANGE})
"""The same request will fail again: somebody must change something."""

PATIENT = frozenset(
    {
        Code.UNAVAILABLE,
        Code.FAILED_PRECONDITION,
        Code.RESOURCE_EXHAUSTED,
        Code.CANCELLED,
        Code.ABORTED,
        Code.UNAUTHENTICATED,
    }
)
"""The peer is unreachable, busy or changing, and comes back. Retried without limit. New tokens and certificates reach
processes one after the other, and a trainer that is started again reads them."""

MAX_FAILURES = 5
"""Maximum consecutive failures with every other code (INTERNAL, DATA_LOSS, DEADLINE_EXCEEDED, …)."""

TRAINER_COMMANDS = (EnsureTrainer, TrainStep, Publish, Checkpoint, Export)

WAITS_FOR_PEOPLE = {Code.RESOURCE_EXHAUSTED: (TrainStep, Checkpoint, Export), Code.UNIMPLEMENTED: (EnsureTrainer,)}
"""No room on a disk; a checkpoint of another version of Flowfleet. Another trainer would meet the same."""


class FailureAction(StrEnum):
    """Action after a failed call."""

    RETRY = "retry"  # the same again after the delay
    REPLACE = "replace"  # the trainer hangs: end it, then resync
    RESYNC = "resync"  # forget what is known of the trainer, ask it again, restart it if it is gone
    GIVE_UP = "give_up"  # drop what the command was for, with its reason
    FAIL_JOB = "fail_job"  # the job ends


@dataclass(frozen=True)
class Decision:
    action: FailureAction
    delay_s: float = 0.0


def decide(command: Command, code: grpc.StatusCode, failures: int) -> Decision:
    """`failures` counts this one and those before it in a row."""
    delay = backoff_s(failures, 0.2, 10.0)
    of_trainer = isinstance(command, TRAINER_COMMANDS)
    if isinstance(command, WAITS_FOR_PEOPLE.get(code, ())):
        return Decision(FailureAction.RETRY, delay)
    if code in PERMANENT:
        return Decision(FailureAction.FAIL_JOB)
    if code not in PATIENT and failures >= MAX_FAILURES:
        return Decision(FailureAction.FAIL_JOB if of_trainer else FailureAction.GIVE_UP)
    if of_trainer and code is Code.DEADLINE_EXCEEDED:
        return Decision(FailureAction.REPLACE, delay)
    return Decision(FailureAction.RESYNC if of_trainer else FailureAction.RETRY, delay)
