"""The table that services/controller/job/step.py opens with, held against the state machine."""

from __future__ import annotations

import re
from typing import get_args

from services.controller.job import step
from services.controller.job.machine import events as ev
from services.controller.job.machine.command import Command, Generate, Publish, Score
from services.controller.job.machine.state import Status
from services.controller.job.machine.state_machine import Machine
from tests.services.controller.job.machine.test_state_machine import make_spec

NAMES = [command.__name__ for command in get_args(Command)]
ROWS = [re.split(r"\s{2,}", line.strip()) for line in (step.__doc__ or "").splitlines()]
TABLE = {row[0]: row[3].split(", ") for row in ROWS if row[0] in NAMES}
"""Command → events that it ends with."""


def facts(machine: Machine, command: Command, name: str) -> list[ev.Event]:
    """The events of a name that a command which went well ends with."""
    event = getattr(ev, name)
    match command:
        case Generate(at, groups):
            places = [(at, group, index) for group in groups for index in machine.wanted(at, group)]
            return [event(step=at, group=group, index=index, version=at) for at, group, index in places]
        case Score(at, group):
            result = {"score": 1.0} if name == "Scored" else {"reason": "no_score_ocr"}
            indices = machine.state.batches[at].groups[group]
            return [event(step=at, group=group, index=index, **result) for index in indices]
        case Publish(version, evaluated):
            return [event(version=version, evaluated=evaluated)]
        case _:
            return [event(**{"version": 0, "reward": None} | vars(command))]


def test_table_has_every_command_in_the_machine_s_order() -> None:
    assert list(TABLE) == NAMES


def test_each_event_of_the_table_ends_its_command() -> None:
    """A job that hears the table's events alone runs every command and succeeds."""
    seen, ended_by = set[str](), set[str]()
    for choice in range(2):  # Score has two; all samples of a step that are dropped leave nothing to refill here
        spec = make_spec(schedule={"steps": 2, "save_every": 1, "validate_every": 1}, rollout={"max_refills": 0})
        machine = Machine(spec)
        while commands := sorted(machine.commands(), key=str):
            command = commands[0]
            names = TABLE[type(command).__name__]
            name = names[min(choice, len(names) - 1)]
            for fact in facts(machine, command, name):
                machine.apply(fact)
            assert command not in machine.commands()
            seen.add(type(command).__name__)
            ended_by.add(name)
        assert machine.state.status is Status.SUCCEEDED
    assert seen == set(NAMES)
    assert ended_by == {name for names in TABLE.values() for name in names}
